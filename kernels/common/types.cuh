// Element types and their conversions, and access to single elements of a matrix.
//
// Kernels read the dtype of a matrix from its KlMat and branch on it once, at the top (see with_type), so that one entry point serves
// all storage types. Arithmetic is in f32; a result is rounded once, when it is stored. Offsets are 64-bit: at 52,000 tokens one
// activation is larger than 2 GB.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <abi.h>
#include <common/e4m3.cuh>

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class T>
struct Type {
  using type = T;
};

// An operand type whose dtype is looked up with every access.
struct Any {};

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

// Calls f with the dtypes of an activation and of a weight.
template <class F>
__device__ __forceinline__ void with_operand_types(uint32_t activation, uint32_t weight, F f) {
  with_type(activation, [&](auto t) { with_weight_type(weight, [&](auto u) { f(t, u); }); });
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(f16 v) { return __half2float(v); }
__device__ __forceinline__ float to_float(e4m3 v) { return decode_e4m3(v.bits); }

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

// Loads and stores of single plain values, for callers that would not gain from a specialization per dtype.
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

// Loads an element of an operand that may also be e4m3.
template <>
__device__ __forceinline__ float load<Any>(const KlMat& m, uint64_t row, uint64_t col) {
  return m.dtype == KL_E4M3 ? load<e4m3>(m, row, col) * m.scale : load_any(m, row, col);
}

// Values that do not fit are added to the count at `saturated`.
__device__ __forceinline__ void store_quantized(const KlMat& m, uint64_t row, uint64_t col, float v, uint64_t saturated) {
  if (m.dtype != KL_E4M3) return store_any(m, row, col, v);
  const float scaled[1] = {v / m.scale};
  count_saturated<1>(saturated, scaled);
  row_of<e4m3>(m, row)[col] = e4m3{static_cast<uint8_t>(pack_e4m3(scaled[0], 0.0f))};
}
