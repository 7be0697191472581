// Reductions and exchanges across the lanes of a warp.
#pragma once

#include <ptx/sm80.cuh>

__device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }

// Adds each of kCount values across groups of kLanes consecutive lanes. The shuffles of the values overlap.
template <int kLanes, int kCount>
__device__ __forceinline__ void sum_lanes(float (&v)[kCount]) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i++) v[i] += __shfl_xor_sync(0xffffffffu, v[i], offset);
  }
}

__device__ __forceinline__ float warp_sum(float v) {
  float sum[1] = {v};
  sum_lanes<32>(sum);
  return sum[0];
}

// Reductions across a quad: the four consecutive lanes that hold a row of an MMA fragment.
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// The largest of the quad's magnitudes, as bits. NaN is the largest.
__device__ __forceinline__ uint32_t quad_max_bits(uint32_t v) {
  v = max(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return max(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// Transposes 4x4 words among the four lanes of a quad: lane i ends with the i-th word of each lane. If each lane had every fourth word of a
// row, these are 16 contiguous bytes of the row.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&v)[4]) {
  const bool odd = lane() % 2, high = lane() / 2 % 2;
  const auto swap = [](bool second, uint32_t a, uint32_t b, uint32_t with) {
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, second ? a : b, with);
    return second ? make_uint2(theirs, b) : make_uint2(a, theirs);
  };
  const uint2 front = swap(odd, v[0], v[1], 1), back = swap(odd, v[2], v[3], 1);
  const uint2 x = swap(high, front.x, back.x, 2), y = swap(high, front.y, back.y, 2);
  return make_uint4(x.x, y.x, x.y, y.y);
}

// Transposes 4x4 half words among the lanes of a quad. Each lane has four, two in each word; lane i ends with the i-th of each lane, which
// are eight contiguous bytes.
__device__ __forceinline__ uint2 transpose_quad_halves(uint32_t front, uint32_t back) {
  const bool odd = lane() % 2, high = lane() / 2 % 2;
  // Halves 0 and 1 go to the first two lanes, 2 and 3 to the others.
  const uint32_t theirs = __shfl_xor_sync(0xffffffffu, high ? front : back, 2);
  const uint32_t a = high ? theirs : front, b = high ? back : theirs;  // from the lower and the upper lane of the two
  // Then even halves go to even lanes. Selectors pick the lower or the upper half of both words.
  constexpr uint32_t kLower = 0x5410, kUpper = 0x7632;
  const uint32_t mine = __byte_perm(a, b, odd ? kUpper : kLower), other = __shfl_xor_sync(0xffffffffu, __byte_perm(a, b, odd ? kLower : kUpper), 1);
  const uint32_t even_lanes = odd ? other : mine, odd_lanes = odd ? mine : other;
  return make_uint2(__byte_perm(even_lanes, odd_lanes, kLower), __byte_perm(even_lanes, odd_lanes, kUpper));
}
