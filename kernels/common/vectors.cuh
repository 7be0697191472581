// Vectorized loads and stores: kVector values at a time, or a pair.
#pragma once

#include <common/types.cuh>

constexpr int kVector = 8;  // values per vectorized access: 16 bytes of bf16

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

__device__ __forceinline__ void store_vector(e4m3* to, const float (&v)[kVector]) {
  const uint32_t front = pack_e4m3(v[0], v[1]) | pack_e4m3(v[2], v[3]) << 16, back = pack_e4m3(v[4], v[5]) | pack_e4m3(v[6], v[7]) << 16;
  *reinterpret_cast<uint2*>(to) = make_uint2(front, back);
}

// Two adjacent values.
__device__ __forceinline__ float2 unpack_pair(uint32_t word) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&word));
}
__device__ __forceinline__ float2 load_pair(const float* from) { return *reinterpret_cast<const float2*>(from); }
__device__ __forceinline__ float2 load_pair(const bf16* from) { return unpack_pair(*reinterpret_cast<const uint32_t*>(from)); }
__device__ __forceinline__ void store_pair(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }
__device__ __forceinline__ void store_pair(bf16* to, float a, float b) { *reinterpret_cast<uint32_t*>(to) = pack_bf16(a, b); }

__device__ __forceinline__ void add_vector(float* to, const float4& v) { to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w; }
