// A kernel of `kiln selftest` for GPUs that multiply FP8.
//
//   kl_selftest_mma_e4m3   one MMA of e4m3 per warp, on fragments stored in memory
#include <ptx/sm89.cuh>
#include <selftest/fragments.cuh>

KL_ENTRY(kl_selftest_mma_e4m3, KlFragments, KL_SELFTEST_THREADS) {
  multiply_fragments(p, [](float(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, uint32_t, uint32_t) { mma_e4m3(d, a, b0, b1); });
}
