// TMA tensor maps as the emulator encodes them, and the geometry of their boxes.
#pragma once

#include <stdint.h>

struct KlTensorMap;

namespace kl_emu {

constexpr uint32_t kTmaRank = 3;

// The content of the 128 bytes of an encoded map. Size and box are 1 in dimensions that the tensor lacks; a matrix has one plane.
struct TensorMap {
  uint64_t mark;  // distinguishes an encoded map from other bytes
  uint64_t address;
  uint32_t element_bytes, rank;
  uint64_t size[kTmaRank];
  uint64_t pitch[kTmaRank - 1];  // bytes from row to row, and from plane to plane
  uint32_t box[kTmaRank];
  uint32_t swizzle;

  uint32_t row_bytes() const { return box[0] * element_bytes; }
  uint32_t box_bytes() const { return row_bytes() * box[1] * box[2]; }
};
static_assert(sizeof(TensorMap) <= 128, "a tensor map has 128 bytes");

// The map at a kernel's pointer. Fails unless it is aligned and was encoded with this rank.
const TensorMap& decode_map(const void* map, uint32_t rank, const char* operation);

// The address of a 16-byte chunk of a box, given its address without the swizzle. Address bits 4 to 6 (or fewer, for narrower swizzles) are
// XORed with the bits from 7 on, so the pattern is a function of the shared address.
constexpr uint32_t swizzled(uint32_t address, uint32_t swizzle) {
  return swizzle == 0 ? address : address ^ (address >> 3 & (swizzle - 16));
}

// The elements [first, end) of row `row` of the box at `origin` that exist in the tensor, and their address. If none exists, first == end.
struct BoxRow {
  uint32_t first, end;
  uint64_t address;
};
BoxRow box_row(const TensorMap& map, const int32_t (&origin)[kTmaRank], uint32_t row);

}  // namespace kl_emu
