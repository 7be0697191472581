// Kernels of `kiln selftest` that every supported GPU runs.
//
//   kl_selftest_convert    values as codes of e4m3 and of e2m1, by the instruction where there is one and in software elsewhere
//   kl_selftest_mma_bf16   one MMA of bf16 per warp, on fragments stored in memory
//
// Bound: latency; the data are a few megabytes.
#include <common/nvfp4.cuh>
#include <ptx/sm80.cuh>
#include <selftest/fragments.cuh>

// The instructions convert pairs: a value, and its negative.
KL_ENTRY(kl_selftest_convert, KlConversions, KL_SELFTEST_THREADS) {
  const uint64_t i = static_cast<uint64_t>(blockIdx.x) * KL_SELFTEST_THREADS + threadIdx.x;
  if (i >= p.count) return;
  const float v = reinterpret_cast<const float*>(p.values)[i];
  reinterpret_cast<uint16_t*>(p.e4m3)[i] = static_cast<uint16_t>(pack_e4m3(v, -v));
  reinterpret_cast<uint8_t*>(p.e2m1)[i] = static_cast<uint8_t>(pack_e2m1(v, -v));
}

KL_ENTRY(kl_selftest_mma_bf16, KlFragments, KL_SELFTEST_THREADS) {
  multiply_fragments(p, [](float(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, uint32_t, uint32_t) { mma(d, a, b0, b1); });
}
