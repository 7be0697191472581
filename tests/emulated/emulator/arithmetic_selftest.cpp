// Tests of arithmetic.h: known numbers, and the vectorized model against a slow one in 128-bit integers.
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <initializer_list>

#include "arithmetic.h"
#include "emulator.h"

namespace {

thread_local char failure[512];

__attribute__((format(printf, 1, 2))) const char* fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(failure, sizeof(failure), format, args);
  va_end(args);
  return failure;
}

uint16_t bf16_bits(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return static_cast<uint16_t>(bits >> 16);
}

uint32_t bits_of(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}

// A finite number as significand * 2^unit, and the exponent for alignment in the model.
struct Term {
  __int128 significand;
  int unit, exponent;
};

Term term_of(MmaElement element, uint32_t bits) {
  const int mantissa_bits = element == MmaElement::kBf16 ? 7 : 3, bias = element == MmaElement::kBf16 ? 127 : 7;
  const int total = element == MmaElement::kBf16 ? 16 : 8;
  const int field = bits % (1u << (total - 1)) >> mantissa_bits, mantissa = bits % (1u << mantissa_bits);
  const int exponent = (field == 0 ? 1 : field) - bias;
  const int magnitude = field == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return {bits >> (total - 1) ? -magnitude : magnitude, exponent - mantissa_bits, magnitude == 0 ? -126 : exponent};
}

Term term_of(float v) {
  int exponent = -126;
  if (v != 0.0f) frexpf(v, &exponent), exponent = exponent - 1 < -126 ? -126 : exponent - 1;
  return {static_cast<__int128>(ldexp(v, 23 - exponent)), exponent - 23, exponent};
}

// The term in units of 2^unit, truncated toward zero.
__int128 in_units(const Term& term, int unit) {
  const int shift = term.unit - unit;
  if (term.significand == 0) return 0;
  if (shift >= 0) return term.significand * (static_cast<__int128>(1) << shift);
  return -shift > 100 ? 0 : term.significand / (static_cast<__int128>(1) << -shift);
}

float slow_step(const MmaModel& model, const Term* terms, int count) {
  int largest = terms[0].exponent;
  for (int i = 1; i < count; i++) largest = terms[i].exponent > largest ? terms[i].exponent : largest;
  const int unit = largest - model.sum_places;
  __int128 sum = 0;
  for (int i = 0; i < count; i++) sum += in_units(terms[i], unit);
  if (sum == 0) return 0.0f;
  const __int128 magnitude = sum < 0 ? -sum : sum;
  int top = 0;
  while (magnitude >> (top + 1)) top++;
  const int exponent = top + unit < -126 ? -126 : top + unit, drop = exponent - model.accumulator_places - unit;
  const __int128 kept = drop > 0 ? magnitude >> drop << drop : magnitude;
  const double v = ldexp(static_cast<double>(kept), unit);
  const float result = v >= ldexp(1.0, 128) ? INFINITY : static_cast<float>(v);
  return sum < 0 ? -result : result;
}

float slow_multiply(const MmaModel& model, int k, const uint32_t* a, const uint32_t* b, float c) {
  for (int first = 0; first < k; first += model.step) {
    Term terms[kMmaMaxK + 1] = {term_of(c)};
    for (int i = 0; i < model.step; i++) {
      const Term x = term_of(model.element, a[first + i]), y = term_of(model.element, b[first + i]);
      terms[i + 1] = {x.significand * y.significand, x.unit + y.unit, x.exponent + y.exponent};
    }
    c = slow_step(model, terms, model.step + 1);
  }
  return c;
}

// The slow model of NVFP4, whose terms are block sums.
constexpr int kNvf4K = 64, kNvf4Bytes = kNvf4K / 2, kNvf4Blocks = 4;
constexpr MmaModel kNvf4 = {MmaElement::kE4m3 /* of scales */, kNvf4K, 35, 23};

// An element in halves.
int e2m1_halves(const uint8_t* codes, int i) {
  const int code = i % 2 ? codes[i / 2] >> 4 : codes[i / 2] & 15, exponent = code >> 1 & 3, mantissa = code & 1;
  const int magnitude = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return code & 8 ? -magnitude : magnitude;
}

float slow_multiply_nvf4(const uint8_t* a, const uint8_t* b, const uint8_t* scales_a, const uint8_t* scales_b, float c) {
  Term terms[1 + kNvf4Blocks] = {term_of(c)};
  for (int block = 0; block < kNvf4Blocks; block++) {
    int quarters = 0;
    for (int i = 16 * block; i < 16 * block + 16; i++) quarters += e2m1_halves(a, i) * e2m1_halves(b, i);
    const Term x = term_of(kNvf4.element, scales_a[block]), y = term_of(kNvf4.element, scales_b[block]);
    terms[1 + block] = {quarters * x.significand * y.significand, x.unit + y.unit - 2, x.exponent + y.exponent};
  }
  return slow_step(kNvf4, terms, 1 + kNvf4Blocks);
}

struct Generator {
  uint64_t state;
  uint64_t next() {
    state += 0x9e3779b97f4a7c15u;
    uint64_t z = state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
};

struct Named {
  const char* name;
  MmaModel model;
};
constexpr Named kModels[] = {
    {"mma bf16 sm_80", kMmaBf16Sm80}, {"mma bf16 sm_90", kMmaBf16Sm90}, {"wgmma bf16", kWgmmaBf16},
    {"mma e4m3 sm_89", kMmaE4m3Sm89}, {"wgmma e4m3", kWgmmaE4m3},       {"mma e4m3 sm_120", kMmaE4m3Sm120},
    {"mma e4m3 sm_90", kMmaE4m3Sm90},
};

// Random operands: bf16 within `spread` binary orders of magnitude around 2^middle, with some zeros and subnormal numbers.
uint32_t random_element(Generator& random, MmaElement element, int middle, int spread) {
  const uint64_t r = random.next();
  if (r % 16 == 0) return r >> 8 & 1 ? 0x8000u >> (element == MmaElement::kE4m3 ? 8 : 0) : 0;
  if (element == MmaElement::kE4m3) {
    const uint32_t bits = r >> 8 & 0xff;
    return (bits & 0x7f) == 0x7f ? bits ^ 1 : bits;
  }
  int field = 127 + middle + static_cast<int>(r >> 16 & 0xffff) % (2 * spread + 1) - spread;
  field = field < 0 ? 0 : field > 254 ? 254 : field;
  return (r >> 40 & 0x807f) | static_cast<uint32_t>(field) << 7;
}

const char* against_slow_model() {
  constexpr int kRows = 16, kCols = 24, kK = 32;
  constexpr struct {
    int middle, spread, c_exponent;
  } kCases[] = {{0, 3, 0}, {0, 12, 4}, {0, 40, 0}, {-62, 8, -125}, {-70, 60, -130}, {62, 2, 126}, {-3, 0, 20}};
  Generator random{19};
  for (const Named& named : kModels) {
    const MmaModel& model = named.model;
    for (const auto& now : kCases) {
      uint32_t a[kRows * kK], b[kCols * kK];
      float c[kRows * kCols], d[kRows * kCols];
      for (uint32_t& v : a) v = random_element(random, model.element, now.middle, now.spread);
      for (uint32_t& v : b) v = random_element(random, model.element, now.middle, now.spread);
      for (float& v : c) v = static_cast<float>(ldexp(static_cast<double>(static_cast<int32_t>(random.next() >> 32)), now.c_exponent - 31));
      uint16_t a16[kRows * kK], b16[kCols * kK];
      uint8_t a8[kRows * kK], b8[kCols * kK];
      for (int i = 0; i < kRows * kK; i++) a16[i] = static_cast<uint16_t>(a[i]), a8[i] = static_cast<uint8_t>(a[i]);
      for (int i = 0; i < kCols * kK; i++) b16[i] = static_cast<uint16_t>(b[i]), b8[i] = static_cast<uint8_t>(b[i]);
      const bool wide = model.element == MmaElement::kBf16;
      memcpy(d, c, sizeof(d));
      mma_multiply(model, kRows, kCols, kK, wide ? static_cast<void*>(a16) : a8, wide ? static_cast<void*>(b16) : b8, d, true);
      for (int row = 0; row < kRows; row++) {
        for (int col = 0; col < kCols; col++) {
          const float slow = slow_multiply(model, kK, a + row * kK, b + col * kK, c[row * kCols + col]), fast = d[row * kCols + col];
          // An overflowed accumulator enters the next step as an infinity, which the slow model does not know.
          if (!isfinite(slow) || !isfinite(fast)) continue;
          if (bits_of(slow) == bits_of(fast)) continue;
          return fail("%s, operands 2^%d +- %d, output (%d, %d): %a, but the slow model has %a", named.name, now.middle, now.spread, row,
                      col, fast, slow);
        }
      }
    }
  }
  return nullptr;
}

// NVFP4 operands for one MMA.
struct Nvf4 {
  static constexpr int kRows = 16, kCols = 8, kOutputs = kRows * kCols;
  uint8_t a[kRows * kNvf4Bytes], b[kCols * kNvf4Bytes], scales_a[kRows * kNvf4Blocks], scales_b[kCols * kNvf4Blocks];
  float c[kOutputs];

  // All codes, scales from `first` to `last` and some zeros, and accumulators below 2^exponent.
  Nvf4(Generator& random, int first, int last, int exponent) {
    for (uint8_t& v : a) v = static_cast<uint8_t>(random.next() >> 32);
    for (uint8_t& v : b) v = static_cast<uint8_t>(random.next() >> 32);
    const auto scale = [&] { return random.next() % 16 == 0 ? 0 : static_cast<uint8_t>(first + random.next() % (last - first + 1)); };
    for (uint8_t& v : scales_a) v = scale();
    for (uint8_t& v : scales_b) v = scale();
    for (float& v : c) v = static_cast<float>(ldexp(static_cast<double>(static_cast<int32_t>(random.next() >> 32)), exponent - 31));
  }

  // Makes the second half of K the negative of the first half, except for a last block with other scales.
  void cancel() {
    for (int row = 0; row < kRows; row++) memcpy(a + row * kNvf4Bytes + kNvf4Bytes / 2, a + row * kNvf4Bytes, kNvf4Bytes / 2);
    for (int row = 0; row < kRows; row++) scales_a[row * kNvf4Blocks + 2] = scales_a[row * kNvf4Blocks];
    for (int col = 0; col < kCols; col++) {
      uint8_t* half = b + col * kNvf4Bytes + kNvf4Bytes / 2;
      for (int i = 0; i < kNvf4Bytes / 2; i++) half[i] = half[i - kNvf4Bytes / 2] ^ 0x88;
      scales_b[col * kNvf4Blocks + 2] = scales_b[col * kNvf4Blocks];
    }
  }

  float slow(int output, float sum) const {
    const int row = output / kCols, col = output % kCols;
    return slow_multiply_nvf4(a + row * kNvf4Bytes, b + col * kNvf4Bytes, scales_a + row * kNvf4Blocks, scales_b + col * kNvf4Blocks, sum);
  }

  void multiply(float* d) const { mma_multiply_nvf4(kRows, kCols, a, b, scales_a, scales_b, d); }
};

const char* nvf4_against_slow_model() {
  constexpr int kSubnormal = 0x07, kOne = 0x38, kLargest = 0x7e;
  constexpr struct {
    int first, last, exponent;
  } kCases[] = {{0, kLargest, 4},         {0, kLargest, 24},      {kOne, kOne, 12},         {1, kSubnormal, -8},  {1, kSubnormal, 30},
                {kLargest, kLargest, 30}, {0, 0, -120},           {0, kSubnormal, -140},    {0, kLargest, 50},    {0, kLargest, 128},
                {kOne, kLargest, 0},      {0x30, 0x40, -100}};
  Generator random{23};
  for (const auto& now : kCases) {
    // Random operands; halves that cancel; and accumulators that are the negative of the sum.
    for (int kind = 0; kind < 12; kind++) {
      Nvf4 operands(random, now.first, now.last, now.exponent);
      if (kind % 3 == 1) operands.cancel();
      for (int i = 0; i < Nvf4::kOutputs && kind % 3 == 2; i++) operands.c[i] = -operands.slow(i, 0.0f);
      float d[Nvf4::kOutputs];
      memcpy(d, operands.c, sizeof(d));
      operands.multiply(d);
      for (int i = 0; i < Nvf4::kOutputs; i++) {
        const float slow = operands.slow(i, operands.c[i]);
        if (bits_of(slow) == bits_of(d[i])) continue;
        return fail("nvf4, scales %02x to %02x, accumulators 2^%d, kind %d, output %d: %a, but the slow model has %a", now.first, now.last,
                    now.exponent, kind, i, d[i], slow);
      }
    }
  }
  return nullptr;
}

const char* nvf4_known_numbers() {
  constexpr uint8_t kOnes = 0x22, kSixes = 0x77, kScaleOne = 0x38, kSmallest = 0x01, kLargest = 0x7e, kNan = 0x7f;
  const float inf = INFINITY;
  uint8_t a[kNvf4Bytes], b[8 * kNvf4Bytes], scales_a[kNvf4Blocks], scales_b[8 * kNvf4Blocks];
  float d[8] = {};
  // 64 * 6^2 * 448^2 fits in an f32.
  memset(a, kSixes, sizeof(a)), memset(b, kSixes, sizeof(b));
  memset(scales_a, kLargest, sizeof(scales_a)), memset(scales_b, kLargest, sizeof(scales_b));
  mma_multiply_nvf4(1, 8, a, b, scales_a, scales_b, d);
  if (d[0] != 462422016.0f) return fail("nvf4, the largest sum: %g, not 462422016", d[0]);
  // The first block is -2^n, which an accumulator of 2^n cancels. The last block has a quarter of the smallest scales, 2^-20. It is kept
  // while it is at most 35 places below 2^n.
  for (int n = 8; n <= 20; n++) {
    memset(a, 0, sizeof(a)), memset(b, 0, sizeof(b));
    memset(scales_a, 0, sizeof(scales_a)), memset(scales_b, 0, sizeof(scales_b));
    // One product is -4 * 4 * 2^(n - 4), with scales that are powers of two. The other is 0.5 * 0.5.
    a[0] = 0x0e, b[0] = 0x06, a[kNvf4Bytes - 1] = 0x10, b[kNvf4Bytes - 1] = 0x10;
    const int low = (n - 4) / 2, high = n - 4 - low;
    scales_a[0] = static_cast<uint8_t>(kScaleOne + 8 * low), scales_b[0] = static_cast<uint8_t>(kScaleOne + 8 * high);
    scales_a[3] = kSmallest, scales_b[3] = kSmallest;
    d[0] = ldexpf(1.0f, n);
    mma_multiply_nvf4(1, 8, a, b, scales_a, scales_b, d);
    const float expected = n - 35 <= -20 ? ldexpf(1.0f, -20) : 0.0f;
    if (d[0] != expected) return fail("nvf4, 2^%d - 2^%d + 2^-20 = %a, not %a", n, n, d[0], expected);
  }
  // A block counts with the exponent of its scales, 2^16, even if all its elements are zero.
  memset(scales_a, 0, sizeof(scales_a)), memset(scales_b, 0, sizeof(scales_b));
  scales_a[3] = kSmallest, scales_b[3] = kSmallest, d[0] = 0.0f;
  mma_multiply_nvf4(1, 8, a, b, scales_a, scales_b, d);
  if (d[0] != ldexpf(1.0f, -20)) return fail("nvf4, 2^-20 alone: %a", d[0]);
  scales_a[1] = kLargest, scales_b[1] = kLargest;
  mma_multiply_nvf4(1, 8, a, b, scales_a, scales_b, d);
  if (d[0] != 0.0f) return fail("nvf4, 2^-20 and a block of zeros with large scales: %a", d[0]);
  // 1 + 2^-n: the result keeps 23 places.
  for (int n = 18; n < 27; n++) {
    d[0] = ldexpf(1.0f, n - 20);
    memset(scales_a, 0, kNvf4Blocks - 1);
    mma_multiply_nvf4(1, 8, a, b, scales_a, scales_b, d);
    const float expected = n <= 23 ? ldexpf(1.0f, n - 20) + ldexpf(1.0f, -20) : ldexpf(1.0f, n - 20);
    if (d[0] != expected) return fail("nvf4, 2^%d + 2^-20 = %a, not %a", n - 20, d[0], expected);
  }
  // Every element of A meets an equal element of B, and has the scales of its block.
  memset(scales_a, kScaleOne, sizeof(scales_a)), memset(scales_b, kScaleOne, sizeof(scales_b));
  for (int i = 0; i < kNvf4K; i++) {
    memset(a, 0, sizeof(a)), memset(b, kOnes, sizeof(b)), memset(d, 0, sizeof(d));
    a[i / 2] = static_cast<uint8_t>(0x2 << i % 2 * 4), b[i / 2] = static_cast<uint8_t>(0x5 << i % 2 * 4);
    scales_a[i / 16] = kScaleOne + 8;
    mma_multiply_nvf4(1, 8, a, b, scales_a, scales_b, d);
    scales_a[i / 16] = kScaleOne;
    if (d[0] != 6.0f || d[1] != 2.0f) return fail("nvf4, element %d: %g and %g, not 6 and 2", i, d[0], d[1]);
  }
  // A scale that is NaN reaches only its own column, whatever its block holds. An infinity stays infinite.
  memset(a, 0, sizeof(a));
  d[0] = 1.0f, d[1] = inf, d[2] = inf, d[3] = NAN, d[4] = -inf;
  scales_b[0 * kNvf4Blocks + 3] = kNan, scales_b[1 * kNvf4Blocks] = kNan;
  mma_multiply_nvf4(1, 8, a, b, scales_a, scales_b, d);
  if (bits_of(d[0]) != 0x7fffffffu || bits_of(d[1]) != 0x7fffffffu || d[2] != inf || bits_of(d[3]) != 0x7fffffffu || d[4] != -inf) {
    return fail("nvf4, special values: %g, %g, %g, %g, %g", d[0], d[1], d[2], d[3], d[4]);
  }
  // The largest accumulator, with all products below its last place, and a sum of negative zeros.
  memset(a, kSixes, sizeof(a)), memset(b, kSixes, sizeof(b)), memset(scales_b, kLargest, sizeof(scales_b));
  memset(scales_a, kLargest, sizeof(scales_a));
  for (float& v : d) v = FLT_MAX;
  mma_multiply_nvf4(1, 8, a, b, scales_a, scales_b, d);
  if (d[0] != FLT_MAX) return fail("nvf4, the largest number: %g", d[0]);
  memset(a, 0x88, sizeof(a));
  for (float& v : d) v = -0.0f;
  mma_multiply_nvf4(1, 8, a, b, scales_a, scales_b, d);
  if (bits_of(d[0]) != 0) return fail("nvf4, a sum of negative zeros has the bits %08x", bits_of(d[0]));
  return nullptr;
}

// One dot product in e4m3 whose operands are all 1.125. Partial sums are added to an f32 every `promote` elements.
float coherent_e4m3(int k, int promote) {
  uint8_t a[32], b[8 * 32];
  memset(a, 0x39, sizeof(a)), memset(b, 0x39, sizeof(b));
  float total = 0.0f, d[8] = {};
  for (int i = 0; i < k; i += 32) {
    mma_multiply(kWgmmaE4m3, 1, 8, 32, a, b, d, i % promote != 0);
    if ((i + 32) % promote == 0 || i + 32 == k) total += d[0];
  }
  return total;
}

const char* known_numbers() {
  // 1.125^2 * 12288 = 15552. Without promotion, small terms are truncated against the large sum.
  if (const float v = coherent_e4m3(12288, 128); v != 15552.0f) return fail("e4m3 promoted every 128: %g, not 15552", v);
  if (const float v = coherent_e4m3(12288, 12288); v != 13115.0f) return fail("e4m3 never promoted: %g, not 13115", v);
  // Small integers are exact.
  uint16_t a[16 * 16], b[8 * 16];
  float d[16 * 8];
  for (int i = 0; i < 16 * 16; i++) a[i] = bf16_bits(static_cast<float>(i % 11 - 5));
  for (int i = 0; i < 8 * 16; i++) b[i] = bf16_bits(static_cast<float>(i % 7 - 3));
  for (const MmaModel& model : {kMmaBf16Sm80, kMmaBf16Sm90}) {
    mma_multiply(model, 16, 8, 16, a, b, d, false);
    for (int row = 0; row < 16; row++) {
      for (int col = 0; col < 8; col++) {
        int sum = 0;
        for (int i = 0; i < 16; i++) sum += ((row * 16 + i) % 11 - 5) * ((col * 16 + i) % 7 - 3);
        if (d[row * 8 + col] != static_cast<float>(sum)) return fail("small integers: %g, not %d", d[row * 8 + col], sum);
      }
    }
  }
  // 1 and fifteen terms of 2^-n. Terms above the last place of the sum count; terms below it are lost. Eight terms are a step of sm_80.
  for (int n = 20; n < 28; n++) {
    for (int i = 0; i < 16; i++) a[i] = bf16_bits(i == 0 ? 1.0f : ldexpf(1.0f, -n));
    for (int i = 0; i < 8 * 16; i++) b[i] = bf16_bits(1.0f);
    const auto kept = [](double v) { return floor(v * 8388608.0) / 8388608.0; };
    mma_multiply(kWgmmaBf16, 1, 8, 16, a, b, d, false);
    const double wide = kept(1.0 + (n <= 25 ? ldexp(15.0, -n) : 0.0));
    if (d[0] != wide) return fail("wgmma: 1 + 15 * 2^-%d = %a, not %a", n, d[0], wide);
    mma_multiply(kMmaBf16Sm80, 1, 8, 16, a, b, d, false);
    const double first = kept(1.0 + (n <= 24 ? ldexp(7.0, -n) : 0.0)), both = kept(first + (n <= 24 ? ldexp(8.0, -n) : 0.0));
    if (d[0] != both) return fail("mma of sm_80: 1 + 15 * 2^-%d = %a, not %a", n, d[0], both);
  }
  return nullptr;
}

const char* special_values() {
  const float inf = INFINITY;
  uint16_t a[2 * 16] = {}, b[8 * 16] = {};
  for (int i = 0; i < 2 * 16; i++) a[i] = bf16_bits(1.0f);
  for (int i = 0; i < 8 * 16; i++) b[i] = bf16_bits(1.0f);
  float d[2 * 8];
  a[3] = bf16_bits(inf), b[1 * 16 + 3] = 0, b[2 * 16 + 3] = bf16_bits(-1.0f);
  mma_multiply(kWgmmaBf16, 2, 8, 16, a, b, d, false);
  if (d[0] != inf || bits_of(d[1]) != 0x7fffffffu || d[2] != -inf) return fail("infinity times 1, 0, -1: %g, %g, %g", d[0], d[1], d[2]);
  for (int col = 0; col < 8; col++) {
    const float expected = col == 1 ? 15.0f : col == 2 ? 14.0f : 16.0f;
    if (d[8 + col] != expected) return fail("a row without infinities, column %d: %g, not %g", col, d[8 + col], expected);
  }
  for (float& v : d) v = inf;
  a[3] = bf16_bits(-inf);
  mma_multiply(kWgmmaBf16, 1, 8, 16, a, b, d, true);
  if (bits_of(d[0]) != 0x7fffffffu) return fail("infinity minus infinity: %g", d[0]);
  // Overflow of finite operands, and the sign of zero.
  for (int i = 0; i < 16; i++) a[i] = 0x7f7f;
  mma_multiply(kWgmmaBf16, 1, 8, 16, a, a, d, false);
  if (d[0] != inf) return fail("overflow: %g", d[0]);
  for (int i = 0; i < 16; i++) a[i] = 0x8000;
  mma_multiply(kWgmmaBf16, 1, 8, 16, a, b, d, false);
  if (bits_of(d[0]) != 0) return fail("a sum of negative zeros has the bits %08x", bits_of(d[0]));
  return nullptr;
}

}  // namespace

extern "C" const char* kl_emu_selftest(void) {
  for (const auto test : {known_numbers, special_values, against_slow_model, nvf4_known_numbers, nvf4_against_slow_model}) {
    if (const char* failed = test()) return failed;
  }
  return nullptr;
}
