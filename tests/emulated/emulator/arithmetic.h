// The arithmetic of tensor cores, to the bit.
//
// This is MMA-Sim's model (arXiv 2511.10909), whose authors compared it with the hardware. The products of one step along K are exact.
// Products and accumulator are aligned to the largest exponent among them and truncated a fixed number of binary places below it. Their sum
// is exact, and is truncated to the accumulator. The exponent of a product is the sum of its factors' exponents, so its significand is
// below 4, not below 2. Subnormal numbers have the exponent of the smallest normal number.
#pragma once

#include <stdint.h>

enum class MmaElement { kBf16, kE4m3 };

struct MmaModel {
  MmaElement element;
  int step;                // elements of K that are summed at once
  int sum_places;          // binary places that terms keep below the largest exponent
  int accumulator_places;  // binary places of the result's significand: 23 is all of an f32
};

// mma.sync by architecture, wgmma, and their FP8 forms.
constexpr MmaModel kMmaBf16Sm80 = {MmaElement::kBf16, 8, 24, 23};
constexpr MmaModel kMmaBf16Sm90 = {MmaElement::kBf16, 16, 25, 23};
constexpr MmaModel kWgmmaBf16 = {MmaElement::kBf16, 16, 25, 23};
constexpr MmaModel kMmaE4m3Sm89 = {MmaElement::kE4m3, 16, 13, 13};
// sm_90 and sm_100 lack this instruction. Operands are converted to f16, which holds all e4m3 values, and multiplied as f16.
constexpr MmaModel kMmaE4m3Sm90 = {MmaElement::kE4m3, 16, 25, 23};
constexpr MmaModel kWgmmaE4m3 = {MmaElement::kE4m3, 32, 13, 13};
constexpr MmaModel kMmaE4m3Sm120 = {MmaElement::kE4m3, 32, 25, 23};

constexpr int kMmaMaxRows = 64, kMmaMaxCols = 256, kMmaMaxK = 32;

// d = a b^T, added to d if `accumulate` is set. `a` is rows x k and `b` is cols x k, both with K contiguous, as raw bits of the elements
// (two bytes each for bf16, one for e4m3); `d` is rows x cols. `cols` is a multiple of 8, `k` one of the model's step.
void mma_multiply(const MmaModel& model, int rows, int cols, int k, const void* a, const void* b, float* d, bool accumulate);

// d += a b^T over 64 of K in e2m1, two elements to a byte, the smaller index in the low nibble. `scales_a` and `scales_b` hold four
// unsigned e4m3 scales per row and column, of sixteen elements each. Block sums are exact. Multiplied by their scales they keep, like the
// accumulator, 35 binary places below the largest exponent. A block has the exponent of its scales.
void mma_multiply_nvf4(int rows, int cols, const uint8_t* a, const uint8_t* b, const uint8_t* scales_a, const uint8_t* scales_b, float* d);
