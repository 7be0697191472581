// Expands codes of quantized weights to bf16, exactly. Tensor and row scales are not applied.
#pragma once

#include <common/nvfp4.cuh>
#include <ptx/sm80.cuh>

// Four e4m3 codes as two pairs of bf16. No code is NaN: the host refuses such weights.
__device__ __forceinline__ uint2 e4m3_to_bf16(uint32_t codes) {
  // A half word has a code below eight copies of its sign. Shifted by four, the bits are in their bf16 places, but the exponent bias of
  // bf16 is larger by 120. The product is exact, so this holds for subnormal codes as well.
  constexpr uint32_t kSignExponentMantissa = 0x87f087f0, kTwoTo120 = 0x7b807b80;
  const auto pair = [](uint32_t extended) { return mul_bf16x2(extended << 4 & kSignExponentMantissa, kTwoTo120); };
  return make_uint2(pair(permute_bytes<0x9180>(codes)), pair(permute_bytes<0xb3a2>(codes)));
}

// Eight e2m1 codes, the even column in the high nibble of a byte, times their block scale, as four pairs of bf16. A product has at most six
// significant bits, so it is exact.
__device__ __forceinline__ uint4 e2m1_to_bf16(uint32_t codes, uint32_t scale) {
  // The high nibbles of both halves of a word are moved to bf16's sign and the end of its exponent. The bf16 exponent bias is larger by
  // 126, which `scale` makes up for.
  constexpr uint32_t kSign = 0x80008000, kExponentMantissa = 0x01c001c0;
  const uint32_t odd = codes << 4;
  const auto pair = [&](uint32_t nibbles) { return mul_bf16x2(nibbles & kSign | nibbles >> 6 & kExponentMantissa, scale); };
  return make_uint4(pair(permute_bytes<0x4000>(codes, odd)), pair(permute_bytes<0x5010>(codes, odd)),
                    pair(permute_bytes<0x6020>(codes, odd)), pair(permute_bytes<0x7030>(codes, odd)));
}

// An e4m3 block scale times 2^117, as a pair of bf16. With the 2^-126 of e2m1_to_bf16, 2^-9 remains, which `alpha` makes up for: the
// largest scale times 2^126 is not finite.
__device__ __forceinline__ uint32_t block_scale(uint32_t code) {
  // As in e4m3_to_bf16; 2^237 is two factors.
  constexpr uint32_t kExponentMantissa = 0x07f007f0, kTwoTo126 = 0x7e807e80, kTwoTo111 = 0x77007700;
  return mul_bf16x2(mul_bf16x2(code * 0x00100010 & kExponentMantissa, kTwoTo126), kTwoTo111);
}
