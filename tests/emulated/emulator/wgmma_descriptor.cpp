#include "wgmma_descriptor.h"

#include <string.h>

#include "runtime.h"
#include "tma_map.h"

namespace kl_emu {
namespace {

// Bits of a descriptor: the start address, the leading and the stride byte offset, all without their last four bits; the base offset; and
// the swizzle mode.
constexpr uint64_t kFieldBits = 0x3fff, kLeadingShift = 16, kStrideShift = 32, kBaseOffsetShift = 49, kSwizzleShift = 62;
constexpr uint64_t kUnused = ~(kFieldBits | kFieldBits << kLeadingShift | kFieldBits << kStrideShift | uint64_t{7} << kBaseOffsetShift |
                               uint64_t{3} << kSwizzleShift);
constexpr uint64_t kSwizzle128 = 1;
constexpr uint32_t kRowBytes = 128, kPeriod = 8 * kRowBytes, kSlab = 64;

}  // namespace

WgmmaOperand::WgmmaOperand(uint64_t descriptor, bool mn_major, uint32_t rows, const char* name) : mn_major(mn_major), rows(rows) {
  const auto bits = static_cast<unsigned long long>(descriptor);
  KL_EMU_CHECK((descriptor & kUnused) == 0, "wgmma: the descriptor 0x%llx of %s has unused bits", bits, name);
  KL_EMU_CHECK(descriptor >> kSwizzleShift == kSwizzle128, "wgmma: the descriptor 0x%llx of %s has swizzle mode %llu, not 128 bytes (1)",
               bits, name, bits >> kSwizzleShift);
  KL_EMU_CHECK((descriptor >> kBaseOffsetShift & 7) == 0, "wgmma: the descriptor 0x%llx of %s has a base offset", bits, name);
  start = static_cast<uint32_t>(descriptor & kFieldBits) << 4;
  leading = static_cast<uint32_t>(descriptor >> kLeadingShift & kFieldBits) << 4;
  stride = static_cast<uint32_t>(descriptor >> kStrideShift & kFieldBits) << 4;
  if (mn_major) {
    KL_EMU_CHECK(stride % kPeriod == 0, "wgmma: the descriptor of %s has a stride of %u bytes; the swizzle repeats every %u", name, stride,
                 kPeriod);
    KL_EMU_CHECK(start / kRowBytes % 8 == 0, "wgmma: the descriptor of %s starts at +0x%x, which is not where the swizzle begins", name,
                 start);
    KL_EMU_CHECK(start % kRowBytes == 0, "wgmma: the descriptor of %s starts at +0x%x, within a row", name, start);
    KL_EMU_CHECK(rows <= kSlab || leading % kPeriod == 0, "wgmma: the descriptor of %s has a leading offset of %u bytes", name, leading);
    return;
  }
  // Rows may begin anywhere, as an H200 has shown: the swizzle is a function of addresses. Within a row, K advances the start by up to
  // three steps of 32 bytes.
  KL_EMU_CHECK(stride % kRowBytes == 0, "wgmma: the descriptor of %s has a stride of %u bytes, which is not a number of rows", name, stride);
  KL_EMU_CHECK(start % kRowBytes + kWgmmaK * 2 <= kRowBytes, "wgmma: the descriptor of %s starts at +0x%x and crosses a row", name, start);
  // K-major operands with the 128-byte swizzle have no leading offset. The manual requires 1.
  KL_EMU_CHECK(leading == 16, "wgmma: the K-major descriptor of %s has a leading offset of %u bytes, not 16", name, leading);
}

std::vector<WgmmaOperand::Range> WgmmaOperand::ranges() const {
  std::vector<Range> found;
  const uint32_t first = start / kRowBytes * kRowBytes;
  const auto add = [&](uint32_t address) {
    if (!found.empty() && found.back().address + found.back().bytes == address) {
      found.back().bytes += kPeriod;
    } else {
      found.push_back({address, kPeriod});
    }
  };
  if (mn_major) {
    for (uint32_t slab = 0; slab < rows; slab += kSlab) {
      for (uint32_t k = 0; k < kWgmmaK; k += 8) add(first + slab / kSlab * leading + k / 8 * stride);
    }
  } else {
    for (uint32_t row = 0; row < rows; row += 8) add(first + row / 8 * stride);
  }
  return found;
}

void WgmmaOperand::gather(const unsigned char* arena, uint16_t* to) const {
  if (!mn_major) {
    for (uint32_t row = 0; row < rows; row++) {
      const uint32_t address = start + row / 8 * stride + row % 8 * kRowBytes;
      for (uint32_t k = 0; k < kWgmmaK; k += 8) memcpy(to + row * kWgmmaK + k, arena + swizzled(address + 2 * k, 128), 16);
    }
    return;
  }
  for (uint32_t row = 0; row < rows; row += 8) {
    for (uint32_t k = 0; k < kWgmmaK; k++) {
      const uint32_t address = start + row / kSlab * leading + k / 8 * stride + k % 8 * kRowBytes + row % kSlab * 2;
      uint16_t eight[8];
      memcpy(eight, arena + swizzled(address, 128), sizeof(eight));
      for (uint32_t i = 0; i < 8 && row + i < rows; i++) to[(row + i) * kWgmmaK + k] = eight[i];
    }
  }
}

}  // namespace kl_emu
