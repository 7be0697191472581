// Shared by every kernel file: element types and conversions, matrix accessors, vectorised loads and stores, reductions.
//
// Kernels read the dtype of a matrix from its KlMat and branch on it once, at the top (see with_type), so that one entry point serves
// all storage types. Arithmetic is in f32; a result is rounded once, when it is stored. Offsets are 64-bit: at 52,000 tokens one
// activation is larger than 2 GB.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "abi.h"

// Every entry point takes one struct by value. The remaining arguments are those of __launch_bounds__: the threads of a CTA and, where
// the compiler would otherwise spill to raise occupancy, the number of resident CTAs per SM that is enough.
#define KL_ENTRY(name, Params, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Params p)

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class T>
struct Type {
  using type = T;
};

// Calls f with the dtype of a matrix as a C++ type. Activations are f32 or bf16; weights may also be f16.
template <class F>
__device__ __forceinline__ void with_type(uint32_t dtype, F f) {
  if (dtype == KL_BF16) {
    f(Type<bf16>());
  } else {
    f(Type<float>());
  }
}

template <class F>
__device__ __forceinline__ void with_weight_type(uint32_t dtype, F f) {
  if (dtype == KL_F16) {
    f(Type<f16>());
  } else {
    with_type(dtype, f);
  }
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(f16 v) { return __half2float(v); }

template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float v) { return __float2bfloat16_rn(v); }

template <class T>
__device__ __forceinline__ T* row_of(const KlMat& m, uint64_t row) {
  return reinterpret_cast<T*>(m.data) + row * m.stride;
}

template <class T>
__device__ __forceinline__ float load(const KlMat& m, uint64_t row, uint64_t col) {
  return to_float(row_of<const T>(m, row)[col]);
}

// Loads of single values, for callers where a specialisation per dtype would not pay.
__device__ __forceinline__ float load_any(const KlMat& m, uint64_t row, uint64_t col) {
  if (m.dtype == KL_BF16) return load<bf16>(m, row, col);
  if (m.dtype == KL_F16) return load<f16>(m, row, col);
  return load<float>(m, row, col);
}

__device__ __forceinline__ void store_any(const KlMat& m, uint64_t row, uint64_t col, float v) {
  if (m.dtype == KL_BF16) {
    row_of<bf16>(m, row)[col] = from_float<bf16>(v);
  } else {
    row_of<float>(m, row)[col] = v;
  }
}

// The 32-bit address in the shared state space, as PTX instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Release/acquire pair for flags between CTAs: a thread that acquires the flag sees everything that was written before the release.
__device__ __forceinline__ void store_release(uint32_t* to, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// The first k-block of a Stream-K worker, counted over all tiles; the range of the worker before it ends there.
__device__ __forceinline__ uint32_t first_k_block(const KlTileSchedule& schedule, uint32_t worker) {
  return schedule.full_tiles * schedule.k_blocks + worker * schedule.k_blocks_per_worker + min(worker, schedule.remainder);
}

// Loads 16 bytes from L2, past L1. The asm is volatile so that a batch of these loads stays in program order.
__device__ __forceinline__ float4 load_uncached(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}

// ------------------------------------------------------------------------------------------------------------- vectors

constexpr int kVector = 8;  // values per vectorised access: 16 bytes of bf16

// Whether rows can be accessed kVector values at a time.
__device__ __forceinline__ bool vectors_fit(const KlMat& m) {
  const uint32_t size = m.dtype == KL_BF16 || m.dtype == KL_F16 ? 2 : 4;
  const bool rows = m.rows <= 1 || m.stride * size % 16 == 0;
  return m.data % 16 == 0 && rows && m.cols % kVector == 0;
}

__device__ __forceinline__ void load_vector(const float* from, float (&v)[kVector]) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

__device__ __forceinline__ void unpack_bf16(const uint4& raw, float (&v)[kVector]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void load_vector(const bf16* from, float (&v)[kVector]) {
  unpack_bf16(*reinterpret_cast<const uint4*>(from), v);
}

__device__ __forceinline__ void load_vector(const f16* from, float (&v)[kVector]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const f16* h = reinterpret_cast<const f16*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector; i++) v[i] = __half2float(h[i]);
}

__device__ __forceinline__ void store_vector(float* to, const float (&v)[kVector]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_vector(bf16* to, const float (&v)[kVector]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

// ---------------------------------------------------------------------------------------------------------- arithmetic

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// Uses the approximate exponential and division, each accurate to two or three ulp: the exact ones would take as long as the memory
// traffic of an element-wise kernel.
__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

// 2^v, accurate to two ulp; subnormal results are flushed to zero.
__device__ __forceinline__ float exp2_approx(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

// -------------------------------------------------------------------------------------------------------- convolutions

__device__ __forceinline__ uint32_t conv_width(const KlConv& p) {
  return p.sampling == KL_UP ? 2 * p.width : p.sampling == KL_DOWN ? p.width / 2 : p.width;
}

// The input coordinate that filter tap `tap` reads for output coordinate `at`; a coordinate outside the image is zero padding.
__device__ __forceinline__ int32_t conv_source(uint32_t sampling, uint32_t at, uint32_t tap, uint32_t size) {
  if (sampling == KL_DOWN) return static_cast<int32_t>(2 * at + tap);
  const int32_t i = static_cast<int32_t>(at + tap) - 1;
  if (sampling == KL_UP) return i < 0 || i >= static_cast<int32_t>(2 * size) ? -1 : i / 2;
  return i;
}
