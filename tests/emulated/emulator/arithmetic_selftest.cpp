// Tests of arithmetic.h: known numbers, and the vectorised model against a slow one in 128-bit integers.
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

// A finite number as significand * 2^unit, and the exponent that the model aligns by.
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

// The term in units of 2^unit, truncated towards zero.
__int128 in_units(const Term& term, int unit) {
  const int shift = term.unit - unit;
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

// Random operands: bf16 within `spread` binary orders of magnitude around 2^middle, with zeros and subnormal numbers in between.
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
          // An overflowed accumulator takes part in the next step as an infinity, which the slow model does not know.
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

// One dot product of which all operands are 1.125 in e4m3, the partial sums added to an f32 every `promote` elements.
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
  // 1.125^2 * 12288 = 15552. Without promotion small terms are truncated against the large sum.
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
  // 1 and fifteen terms of 2^-n: terms above the last place of the sum count, those below are lost. The first eight are a step of sm_80.
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
  for (const auto test : {known_numbers, special_values, against_slow_model}) {
    if (const char* failed = test()) return failed;
  }
  return nullptr;
}
