// Moments of values that are summed in parts: their mean, the sum of their squared deviations from it (M2, as in Welford's algorithm) and
// their count. Merging two parts (Chan et al. 1979) cancels nothing where the mean is far from zero.
#pragma once

#include <common/reduce.cuh>

template <class T, int kAlignment = alignof(T)>
struct alignas(kAlignment) Moments {
  T mean, squares, count;

  template <class Other>
  __device__ __forceinline__ void merge(const Other& other) {
    const T sum = count + other.count, share = sum > 0 ? other.count / sum : 0, delta = other.mean - mean;
    mean += delta * share;
    squares += other.squares + delta * delta * count * share;
    count = sum;
  }

  // Merges with the lane whose index differs by `mask`. Both lanes must get the same bits, so the lower one always comes first.
  __device__ __forceinline__ void merge_lanes(int mask) {
    const Moments other{__shfl_xor_sync(0xffffffffu, mean, mask), __shfl_xor_sync(0xffffffffu, squares, mask),
                        __shfl_xor_sync(0xffffffffu, count, mask)};
    const bool upper = threadIdx.x & mask;
    const Moments low = upper ? other : *this, high = upper ? *this : other;
    *this = low;
    merge(high);
  }
};

// Moments in memory, aligned for loads and stores of one instruction. Registers use the other struct: the compiler would copy the gap.
using StoredMoments = Moments<float, 16>;
