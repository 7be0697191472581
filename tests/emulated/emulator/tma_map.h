// TMA tensor maps as the emulator encodes them, and the geometry of their boxes.
#pragma once

#include <stdint.h>

struct KlTensorMap;

namespace kl_emu {

constexpr uint32_t kTmaRank = 3;

// What the 128 bytes of an encoded map hold. A matrix has one plane: size and box are 1 in dimensions that it does not have.
struct TensorMap {
  uint64_t mark;  // tells an encoded map from other bytes
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

// The map behind a kernel's pointer; fails unless it is aligned and was encoded with this rank.
const TensorMap& decode_map(const void* map, uint32_t rank, const char* operation);

// Where a 16-byte chunk of a box lies, given where it would lie without the swizzle: address bits 4 to 6 (or fewer, for narrower
// swizzles) are exchanged by XOR with the bits from 7 on, so the pattern is a function of the shared address.
constexpr uint32_t swizzled(uint32_t address, uint32_t swizzle) {
  return swizzle == 0 ? address : address ^ (address >> 3 & (swizzle - 16));
}

// The elements [first, end) of row `row` of the box at `origin` that exist in the tensor, and their address; first == end if none does.
struct BoxRow {
  uint32_t first, end;
  uint64_t address;
};
BoxRow box_row(const TensorMap& map, const int32_t (&origin)[kTmaRank], uint32_t row);

}  // namespace kl_emu
