#include "arithmetic.h"

#include <math.h>
#include <string.h>

#include <algorithm>

// Vectors compute eight output columns at once. Their instruction set is chosen when the program starts.
#if defined(__x86_64__) && defined(__GLIBC__)
#define KL_VECTOR_CLONES __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define KL_VECTOR_CLONES
#endif

namespace {

constexpr int kLanes = 8;
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef int64_t Longs __attribute__((vector_size(8 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

// An operand as integers, K-major in pairs of arrays. Significands are signed and have `places` binary places.
template <int kCount>
struct Decoded {
  alignas(32) int32_t significand[kCount];
  alignas(32) int32_t exponent[kCount];
  bool special = false;  // holds an infinity or a NaN
};

struct Format {
  int mantissa_bits, exponent_bits, bias;
};
constexpr Format kBf16 = {7, 8, 127};
constexpr Format kE4m3 = {3, 4, 7};
// Zeros of every format have the exponent of f32's smallest normal number.
constexpr int kZeroExponent = -126;

inline uint32_t bits_of(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}

// The value of an element, for sums that contain an infinity or a NaN.
inline double value_of(MmaElement element, const void* from, int i) {
  if (element == MmaElement::kBf16) return float_of(static_cast<uint32_t>(static_cast<const uint16_t*>(from)[i]) << 16);
  const uint32_t bits = static_cast<const uint8_t*>(from)[i], exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return NAN;
  const double v = exponent ? ldexp(8 + mantissa, static_cast<int>(exponent) - 10) : ldexp(mantissa, -9);
  return bits & 0x80 ? -v : v;
}

template <class Bits>
inline void decode_one(const Format& format, Bits raw, int32_t& significand, int32_t& exponent) {
  const int32_t bits = raw;
  const int32_t field = bits >> format.mantissa_bits & ((1 << format.exponent_bits) - 1);
  const int32_t mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int32_t magnitude = mantissa | (field ? 1 << format.mantissa_bits : 0);
  const bool negative = bits >> (format.mantissa_bits + format.exponent_bits) & 1;
  significand = negative ? -magnitude : magnitude;
  exponent = magnitude ? std::max(field, 1) - format.bias : kZeroExponent;
}

// Decodes `count` rows of `k` elements, taking `step` elements from `first` on. Element (row, i) goes to index row * row_pitch + i *
// k_pitch.
template <int kCount>
void decode(MmaElement element, const void* from, int count, int k, int first, int step, int row_pitch, int k_pitch, Decoded<kCount>& to) {
  for (int row = 0; row < count; row++) {
    for (int i = 0; i < step; i++) {
      const int source = row * k + first + i, at = row * row_pitch + i * k_pitch;
      if (element == MmaElement::kBf16) {
        const uint16_t bits = static_cast<const uint16_t*>(from)[source];
        decode_one(kBf16, bits, to.significand[at], to.exponent[at]);
        to.special |= (bits & 0x7f80) == 0x7f80;
      } else {
        const uint8_t bits = static_cast<const uint8_t*>(from)[source];
        decode_one(kE4m3, bits, to.significand[at], to.exponent[at]);
        to.special |= (bits & 0x7f) == 0x7f;
      }
    }
  }
}

// Truncates a sum to an f32 with `places` binary places. Too large values become infinity.
inline float truncate_to(double v, int places) {
  if (v == 0.0) return 0.0f;
  int exponent;
  frexp(v, &exponent);
  const int unit = std::max(exponent - 1, -126) - places;
  const double truncated = ldexp(trunc(ldexp(v, -unit)), unit);
  return fabs(truncated) >= ldexp(1.0, 128) ? copysignf(INFINITY, truncated) : static_cast<float>(truncated + 0.0);
}

// A sum in IEEE 754 arithmetic, which shows whether it contains an infinity or a NaN.
inline double special_sum(const MmaModel& model, const void* a, const void* b, int k, int row, int col, int first, float c) {
  double sum = c;
  for (int i = first; i < first + model.step; i++) sum += value_of(model.element, a, row * k + i) * value_of(model.element, b, col * k + i);
  return sum;
}

using A = Decoded<kMmaMaxRows * kMmaMaxK>;
using B = Decoded<kMmaMaxCols * kMmaMaxK>;

// One step for all rows and columns. kStep and the binary places of products and terms are constants, so loops unroll.
template <int kStep, int kProductPlaces, int kSumPlaces, int kAccumulatorPlaces>
__attribute__((always_inline)) inline void step_of(int rows, int cols, const A& a, const B& b, float* d) {
  constexpr int kLift = kSumPlaces - kProductPlaces;
  // Terms are below 2^(kSumPlaces + 2), so eight of them fit an int32_t.
  constexpr int kGroup = 8;
  static_assert(kLift >= 0 && kSumPlaces + 2 + 3 <= 30 && kStep % kGroup == 0, "int32_t would overflow");
  const Ints zero = {}, one = zero + 1;
  for (int col = 0; col < cols; col += kLanes) {
    for (int row = 0; row < rows; row++) {
      float* to = d + row * cols + col;
      Ints c;
      memcpy(&c, to, sizeof(c));
      const Ints field = c >> 23 & 0xff, mantissa = c & 0x7fffff;
      const Ints c_exponent = (field > one ? field : one) - 127;
      const Ints c_significand = field > zero ? mantissa | 0x800000 : mantissa;
      Ints largest = c_exponent;
      for (int i = 0; i < kStep; i++) {
        Ints exponent;
        memcpy(&exponent, b.exponent + i * cols + col, sizeof(exponent));
        exponent += a.exponent[row * kStep + i];
        largest = exponent > largest ? exponent : largest;
      }
      Doubles total = {};
      for (int group = 0; group < kStep; group += kGroup) {
        Ints sum = zero;
        for (int i = group; i < group + kGroup; i++) {
          Ints exponent, significand;
          memcpy(&exponent, b.exponent + i * cols + col, sizeof(exponent));
          memcpy(&significand, b.significand + i * cols + col, sizeof(significand));
          const Ints product = significand * (a.significand[row * kStep + i] << kLift), sign = product >> 31;
          const Ints down = largest - (exponent + a.exponent[row * kStep + i]);
          const Ints shift = down > 31 ? zero + 31 : down;
          const Words magnitude = reinterpret_cast<Words>((product ^ sign) - sign) >> reinterpret_cast<Words>(shift);
          sum += (reinterpret_cast<Ints>(magnitude) ^ sign) - sign;
        }
        total += __builtin_convertvector(sum, Doubles);
      }
      const Ints c_down = largest - c_exponent, c_sign = c >> 31;
      constexpr int kUp = kSumPlaces > 23 ? kSumPlaces - 23 : 0, kDown = kSumPlaces < 23 ? 23 - kSumPlaces : 0;
      const Ints c_shift = c_down > 31 - kDown ? zero + 31 : c_down + kDown;
      const Words c_magnitude = reinterpret_cast<Words>(c_significand << kUp) >> reinterpret_cast<Words>(c_shift);
      total += __builtin_convertvector((reinterpret_cast<Ints>(c_magnitude) ^ c_sign) - c_sign, Doubles);
      const Longs scale_bits = (__builtin_convertvector(largest, Longs) + (1023 - kSumPlaces)) << 52;
      total *= reinterpret_cast<Doubles>(scale_bits);
      // For normal numbers, truncation clears bits of the double.
      const Longs kept = reinterpret_cast<Longs>(total) & ~((int64_t{1} << (52 - kAccumulatorPlaces)) - 1);
      const Floats result = __builtin_convertvector(reinterpret_cast<Doubles>(kept), Floats);
      memcpy(to, &result, sizeof(result));
      const Longs magnitude = reinterpret_cast<Longs>(total) & INT64_MAX;
      const Longs subnormal = (magnitude != 0) & (magnitude < (int64_t{1023 - 126} << 52));
      int64_t any = 0;
      for (int i = 0; i < kLanes; i++) any |= subnormal[i];
      if (any) {
        for (int i = 0; i < kLanes; i++) to[i] = truncate_to(total[i], kAccumulatorPlaces);
      }
    }
  }
}

KL_VECTOR_CLONES void step_bf16_sm80(int rows, int cols, const A& a, const B& b, float* d) { step_of<8, 14, 24, 23>(rows, cols, a, b, d); }
KL_VECTOR_CLONES void step_bf16_sm90(int rows, int cols, const A& a, const B& b, float* d) { step_of<16, 14, 25, 23>(rows, cols, a, b, d); }
KL_VECTOR_CLONES void step_e4m3_sm89(int rows, int cols, const A& a, const B& b, float* d) { step_of<16, 6, 13, 13>(rows, cols, a, b, d); }
KL_VECTOR_CLONES void step_e4m3_as_f16(int rows, int cols, const A& a, const B& b, float* d) { step_of<16, 6, 25, 23>(rows, cols, a, b, d); }
KL_VECTOR_CLONES void step_e4m3_sm90(int rows, int cols, const A& a, const B& b, float* d) { step_of<32, 6, 13, 13>(rows, cols, a, b, d); }
KL_VECTOR_CLONES void step_e4m3_sm120(int rows, int cols, const A& a, const B& b, float* d) { step_of<32, 6, 25, 23>(rows, cols, a, b, d); }

void step(const MmaModel& model, int rows, int cols, const A& a, const B& b, float* d) {
  if (model.element == MmaElement::kBf16) return (model.step == 8 ? step_bf16_sm80 : step_bf16_sm90)(rows, cols, a, b, d);
  if (model.step == 16) return (model.sum_places == 13 ? step_e4m3_sm89 : step_e4m3_as_f16)(rows, cols, a, b, d);
  return (model.sum_places == 13 ? step_e4m3_sm90 : step_e4m3_sm120)(rows, cols, a, b, d);
}

}  // namespace

void mma_multiply(const MmaModel& model, int rows, int cols, int k, const void* a, const void* b, float* d, bool accumulate) {
  if (!accumulate) memset(d, 0, static_cast<size_t>(rows) * cols * sizeof(float));
  static thread_local A left;
  static thread_local B right;
  for (int first = 0; first < k; first += model.step) {
    left.special = right.special = false;
    decode(model.element, a, rows, k, first, model.step, model.step, 1, left);
    decode(model.element, b, cols, k, first, model.step, 1, cols, right);
    bool special = left.special || right.special;
    for (int i = 0; i < rows * cols && !special; i++) special = (bits_of(d[i]) & 0x7f800000u) == 0x7f800000u;
    if (!special) {
      step(model, rows, cols, left, right, d);
      continue;
    }
    // Outputs that no infinity or NaN reaches are computed as usual.
    static thread_local float before[kMmaMaxRows * kMmaMaxCols];
    memcpy(before, d, static_cast<size_t>(rows) * cols * sizeof(float));
    step(model, rows, cols, left, right, d);
    for (int row = 0; row < rows; row++) {
      for (int col = 0; col < cols; col++) {
        const double sum = special_sum(model, a, b, k, row, col, first, before[row * cols + col]);
        // Every NaN has the same bit pattern.
        if (!isfinite(sum)) d[row * cols + col] = isnan(sum) ? float_of(0x7fffffffu) : static_cast<float>(sum);
      }
    }
  }
}

namespace {

constexpr int kNvf4Bytes = 32, kNvf4Block = 8, kNvf4Blocks = 4, kNvf4Places = 35;

// Elements as multiples of one half.
constexpr int8_t kE2m1InHalves[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The sum of products in each block of a row and a column, in quarters.
KL_VECTOR_CLONES void block_sums(const int8_t (&a)[2 * kNvf4Bytes], const int8_t (&b)[2 * kNvf4Bytes], int32_t (&sums)[kNvf4Blocks]) {
  for (int block = 0; block < kNvf4Blocks; block++) {
    int32_t sum = 0;
    for (int i = 16 * block; i < 16 * block + 16; i++) sum += a[i] * b[i];
    sums[block] = sum;
  }
}

void halves_of(const uint8_t* codes, int8_t (&to)[2 * kNvf4Bytes]) {
  for (int i = 0; i < kNvf4Bytes; i++) to[2 * i] = kE2m1InHalves[codes[i] & 15], to[2 * i + 1] = kE2m1InHalves[codes[i] >> 4];
}

// Truncates v, aligned to `largest`, to units of the last place that is kept.
double kept_of(double v, int largest) { return trunc(ldexp(v, kNvf4Places - largest)); }

}  // namespace

void mma_multiply_nvf4(int rows, int cols, const uint8_t* a, const uint8_t* b, const uint8_t* scales_a, const uint8_t* scales_b, float* d) {
  static_assert(kNvf4Blocks * kNvf4Block == kNvf4Bytes, "sixteen elements to a block");
  int8_t left[2 * kNvf4Bytes], right[kMmaMaxCols][2 * kNvf4Bytes];
  for (int col = 0; col < cols; col++) halves_of(b + col * kNvf4Bytes, right[col]);
  for (int row = 0; row < rows; row++) {
    halves_of(a + row * kNvf4Bytes, left);
    for (int col = 0; col < cols; col++) {
      int32_t sums[kNvf4Blocks];
      block_sums(left, right[col], sums);
      float& to = d[row * cols + col];
      bool nan = isnan(to);
      int exponents[kNvf4Blocks], largest = to == 0.0f || !isfinite(to) ? kZeroExponent : std::max(ilogbf(to), -126);
      double terms[kNvf4Blocks];
      for (int block = 0; block < kNvf4Blocks; block++) {
        int32_t significands[2], exponent[2];
        const uint8_t codes[2] = {scales_a[row * kNvf4Blocks + block], scales_b[col * kNvf4Blocks + block]};
        for (int i = 0; i < 2; i++) {
          decode_one(kE4m3, static_cast<uint8_t>(codes[i] & 0x7f), significands[i], exponent[i]);
          nan |= (codes[i] & 0x7f) == 0x7f;
        }
        exponents[block] = exponent[0] + exponent[1];
        largest = std::max(largest, exponents[block]);
        terms[block] = ldexp(static_cast<double>(sums[block]) * significands[0] * significands[1], exponents[block] - 2 - 3 - 3);
      }
      if (nan) {
        to = float_of(0x7fffffffu);
        continue;
      }
      if (isinf(to)) continue;
      double total = kept_of(to, largest);
      for (double term : terms) total += kept_of(term, largest);
      to = truncate_to(ldexp(total, largest - kNvf4Places), 23);
    }
  }
}
