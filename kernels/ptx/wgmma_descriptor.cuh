// Matrix descriptors of wgmma operands in shared memory, as the PTX manual lays them out: offsets and addresses are in units of 16 bytes.
#pragma once

#include <stdint.h>

constexpr int kLeadingOffsetBit = 16, kStrideOffsetBit = 32, kSwizzleModeBit = 62;
constexpr uint32_t kDescriptorUnitBytes = 16;
constexpr uint64_t kSwizzle128B = 1;
// Eight rows of 128 bytes, after which the swizzle repeats.
constexpr uint64_t kSwizzlePeriodBytes = 1024;
// Shared memory has 18-bit addresses.
constexpr uint32_t kDescriptorAddressMask = 0x3ffff;

// `leading_offset` is in units.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint64_t leading_offset, uint64_t group_bytes) {
  return (kSwizzle128B << kSwizzleModeBit) | (group_bytes / kDescriptorUnitBytes << kStrideOffsetBit) |
         (leading_offset << kLeadingOffsetBit) | ((address & kDescriptorAddressMask) / kDescriptorUnitBytes);
}

// A K-major operand: rows of 128 bytes with the 128-byte swizzle, in groups of eight that are `group_bytes` apart. The leading offset has
// no meaning for it and is one. The swizzle is a function of the address of each chunk, so groups may begin at any row and be any number of
// rows apart, without a base offset. The manual does not say so; on an H200 each of 48 starts and distances gave the exact product.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint64_t group_bytes = kSwizzlePeriodBytes) {
  return wgmma_descriptor(address, 1, group_bytes);
}

// An MN-major operand (V in attention): rows of K hold 64 contiguous columns in 128 bytes with the 128-byte swizzle, in groups of eight; the
// next 64 columns are `stride` bytes away.
__device__ __forceinline__ uint64_t wgmma_descriptor_mn_major(uint32_t address, uint32_t stride) {
  return wgmma_descriptor(address, stride / kDescriptorUnitBytes, kSwizzlePeriodBytes);
}
