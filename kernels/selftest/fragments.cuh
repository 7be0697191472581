// One MMA per warp, on fragments stored in memory. A one in one place of a fragment shows which element the instruction has there.
#pragma once

#include <stdint.h>

#include <abi.h>

// multiply(d, a, b0, b1, scales_a, scales_b) is the instruction.
template <class Multiply>
__device__ __forceinline__ void multiply_fragments(const KlFragments& p, Multiply multiply) {
  static_assert(KL_FRAGMENT_WORDS == 3 * 4, "a lane has three vectors");
  const uint32_t index = blockIdx.x * (KL_SELFTEST_THREADS / 32) + threadIdx.x / 32;
  if (index >= p.cases) return;
  const uint64_t lane = static_cast<uint64_t>(index) * 32 + threadIdx.x % 32;
  const uint4* from = reinterpret_cast<const uint4*>(p.fragments) + 3 * lane;
  const uint4 first = from[0], second = from[1], third = from[2];
  const uint32_t a[4] = {first.x, first.y, first.z, first.w};
  float d[4] = {__uint_as_float(third.x), __uint_as_float(third.y), __uint_as_float(third.z), __uint_as_float(third.w)};
  multiply(d, a, second.x, second.y, second.z, second.w);
  reinterpret_cast<float4*>(p.results)[lane] = make_float4(d[0], d[1], d[2], d[3]);
}
