// The matrix descriptors of wgmma, which locate an operand's elements in shared memory.
#pragma once

#include <stdint.h>

#include <vector>

namespace kl_emu {

// A descriptor with the 128-byte swizzle, the only mode that kernels use. K-major: rows of 128 bytes with K contiguous, in groups of eight
// rows that are `stride` bytes apart. MN-major: rows of K, each with 64 contiguous elements of M or N, in groups of eight rows that are
// `stride` bytes apart. The next 64 elements of M or N are `leading` bytes away.
struct WgmmaOperand {
  uint32_t start, leading, stride;
  bool mn_major;
  uint32_t rows;  // of M or N

  // Decodes a descriptor. Fails on bits that no such descriptor has.
  WgmmaOperand(uint64_t descriptor, bool mn_major, uint32_t rows, const char* name);

  struct Range {
    uint32_t address, bytes;
  };
  // The shared memory that the operand occupies, in whole rows of 128 bytes.
  std::vector<Range> ranges() const;

  // Copies the elements to `to`, K contiguous. e4m3 elements are copied in pairs.
  void gather(const unsigned char* arena, uint16_t* to) const;
};

constexpr uint32_t kWgmmaK = 16, kWgmmaRows = 64;

}  // namespace kl_emu
