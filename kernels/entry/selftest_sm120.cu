// Kernels of `kiln selftest` for compute capability 12.x.
//
//   kl_selftest_copy_sm120         out = x in bf16, by TMA or by bulk copies (selftest/copy.cuh)
//   kl_selftest_mma_nvf4           one block-scaled MMA of e2m1 per warp, on fragments and scales stored in memory
//   kl_selftest_mma_e4m3_scaled    one block-scaled MMA of e4m3 per warp, with scales of one
//
// Bound: latency; the data are a few megabytes.
#include <ptx/sm120.cuh>
#include <selftest/copy.cuh>
#include <selftest/fragments.cuh>

KL_ENTRY(kl_selftest_copy_sm120, KlTestCopy, KL_SELFTEST_THREADS) { copy_tile_as_asked(p); }

// Calls the instruction with selectors that are only known at run time.
template <int kA>
__device__ __forceinline__ void multiply_selected(uint32_t selector_b, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                  uint32_t scales_a, uint32_t scales_b) {
  switch (selector_b) {
    case 0: return mma_nvf4<kA, 0>(d, a, b0, b1, scales_a, scales_b);
    case 1: return mma_nvf4<kA, 1>(d, a, b0, b1, scales_a, scales_b);
    case 2: return mma_nvf4<kA, 2>(d, a, b0, b1, scales_a, scales_b);
    default: return mma_nvf4<kA, 3>(d, a, b0, b1, scales_a, scales_b);
  }
}

KL_ENTRY(kl_selftest_mma_nvf4, KlFragments, KL_SELFTEST_THREADS) {
  multiply_fragments(p, [&](float(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, uint32_t scales_a, uint32_t scales_b) {
    if (p.selector_a == 0) {
      multiply_selected<0>(p.selector_b, d, a, b0, b1, scales_a, scales_b);
    } else {
      multiply_selected<1>(p.selector_b, d, a, b0, b1, scales_a, scales_b);
    }
  });
}

KL_ENTRY(kl_selftest_mma_e4m3_scaled, KlFragments, KL_SELFTEST_THREADS) {
  multiply_fragments(p, [](float(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, uint32_t, uint32_t) { mma_e4m3_scaled(d, a, b0, b1); });
}
