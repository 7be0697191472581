// The built-ins of CUDA C++ that the kernels use. Functions that need the runtime are defined there. The kernels' own code is instrumented;
// the runtime is not.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "../async_publication.h"

#define __device__
#define __host__
#define __forceinline__ inline

// ----------------------------------------------------------------------------------------------------------------- vectors

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct uint3 {
  uint32_t x, y, z;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// ----------------------------------------------------------------------------------------------------------------- indices

namespace kl_emu {

// A fiber is one thread while it lives, so these are constant within a kernel.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) uint3 block_size();
__attribute__((const)) uint3 grid_size();

uint64_t shuffle_xor(uint32_t mask, uint64_t value, uint32_t lane_mask);

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most eight bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace kl_emu

#define threadIdx (::kl_emu::thread_index())
#define blockIdx (::kl_emu::block_index())
#define blockDim (::kl_emu::block_size())
#define gridDim (::kl_emu::grid_size())

// -------------------------------------------------------------------------------------------------- barriers and collectives

void __syncthreads();
int __syncthreads_or(int predicate);
void __syncwarp(unsigned mask = 0xffffffffu);
unsigned __ballot_sync(unsigned mask, int predicate);
unsigned __reduce_add_sync(unsigned mask, unsigned value);
unsigned __reduce_max_sync(unsigned mask, unsigned value);

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return kl_emu::from_bits<T>(kl_emu::shuffle_xor(mask, kl_emu::to_bits(value), lane_mask));
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return __shfl_xor_sync(mask, value, static_cast<int>(threadIdx.x) % 32 ^ source);
}

// ------------------------------------------------------------------------------------------------------------------ memory

// Accesses with a cache hint are plain accesses here.
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  kl_emu::check_uncached_load(from, sizeof(T));
  return *from;
}
template <class T>
void __stcg(T* to, T value) {
  kl_emu::note_uncached_store(to, &value, sizeof(T));
  *to = value;
}

unsigned atomicAdd(unsigned* at, unsigned value);
unsigned long long atomicAdd(unsigned long long* at, unsigned long long value);
unsigned atomicOr(unsigned* at, unsigned value);
unsigned atomicExch(unsigned* at, unsigned value);
unsigned atomicInc(unsigned* at, unsigned last);
unsigned atomicMax(unsigned* at, unsigned value);
// Orders memory accesses; fibers of one host thread see each other's writes in order anyway.
inline void __threadfence() {}

// -------------------------------------------------------------------------------------------------------------- arithmetic

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// Selects four of the eight bytes of two words by the lower nibbles of the selector.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
// Rounded separately. They are defined elsewhere, so that the compiler cannot contract them to an FMA.
float __fadd_rn(float a, float b);
float __fmul_rn(float a, float b);
inline int __float2int_rn(float v) { return static_cast<int>(rintf(v)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clzll(unsigned long long v) { return v ? __builtin_clzll(v) : 64; }
inline float __uint_as_float(unsigned v) { return kl_emu::from_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return static_cast<unsigned>(kl_emu::to_bits(v)); }
