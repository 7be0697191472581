// Codes of quantized weights as bf16, which is exact: scales of whole tensors or rows are not applied.
#pragma once

#include <common/nvfp4.cuh>
#include <ptx/sm80.cuh>

// Four codes of e4m3 as two pairs of bf16. None of them is NaN: the host refuses such weights.
__device__ __forceinline__ uint2 e4m3_to_bf16(uint32_t codes) {
  // A code and, above it, its sign eight times: shifted by four, its bits are in the places that they have in bf16, but for the bias of
  // the exponent, which is larger there by 120. This holds for subnormal codes as well, since the product is exact.
  constexpr uint32_t kSignExponentMantissa = 0x87f087f0, kTwoTo120 = 0x7b807b80;
  const auto pair = [](uint32_t extended) { return mul_bf16x2(extended << 4 & kSignExponentMantissa, kTwoTo120); };
  return make_uint2(pair(permute_bytes<0x9180>(codes)), pair(permute_bytes<0xb3a2>(codes)));
}

// Eight codes of e2m1, the even column in the high nibble of a byte, times the scale of their block as four pairs of bf16. A product has
// at most six significant bits, so it is exact.
__device__ __forceinline__ uint4 e2m1_to_bf16(uint32_t codes, uint32_t scale) {
  // The high nibbles of both halves of a word are moved to where bf16 has its sign and the end of its exponent: the bias of that is larger
  // by 126, which `scale` makes up for.
  constexpr uint32_t kSign = 0x80008000, kExponentMantissa = 0x01c001c0;
  const uint32_t odd = codes << 4;
  const auto pair = [&](uint32_t nibbles) { return mul_bf16x2(nibbles & kSign | nibbles >> 6 & kExponentMantissa, scale); };
  return make_uint4(pair(permute_bytes<0x4000>(codes, odd)), pair(permute_bytes<0x5010>(codes, odd)),
                    pair(permute_bytes<0x6020>(codes, odd)), pair(permute_bytes<0x7030>(codes, odd)));
}

// The scale of a block, of e4m3, times 2^117 as a pair of bf16. With the 2^-126 of e2m1_to_bf16 there remain 2^-9: `alpha` makes up for it,
// because the largest scale times 2^126 is not finite.
__device__ __forceinline__ uint32_t block_scale(uint32_t code) {
  // As in e4m3_to_bf16; 2^237 is two factors.
  constexpr uint32_t kExponentMantissa = 0x07f007f0, kTwoTo126 = 0x7e807e80, kTwoTo111 = 0x77007700;
  return mul_bf16x2(mul_bf16x2(code * 0x00100010 & kExponentMantissa, kTwoTo126), kTwoTo111);
}
