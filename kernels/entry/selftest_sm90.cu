// Kernels of `kiln selftest` that use each Hopper launch feature once.
//
//   kl_selftest_copy_sm90      out = x in bf16, by TMA or by bulk copies (selftest/copy.cuh)
//   kl_selftest_cluster_sm90   a copy by TMA in clusters of two: each CTA stores the box that its *partner* loaded, which it reads from the
//                              partner's shared memory
//
// Bound: latency; the matrix is a few kilobytes.
#include <selftest/copy.cuh>

KL_ENTRY(kl_selftest_copy_sm90, KlTestCopy, KL_SELFTEST_THREADS) { copy_tile_as_asked(p); }

KL_ENTRY(kl_selftest_cluster_sm90, KlTestCopy, KL_SELFTEST_THREADS) {
  constexpr uint32_t kCols = kTestRowBytes / sizeof(bf16);
  KL_SHARED_ALIGNED(1024, uint16_t, box, [kTestRows * kCols]);
  KL_SHARED_ALIGNED(8, uint64_t, loaded, );
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&loaded), 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(shared_address(&loaded), sizeof(box));
    tma_load_2d(shared_address(box), &p.map, blockIdx.x * kCols, blockIdx.y * kTestRows, shared_address(&loaded));
  }
  mbarrier_wait(shared_address(&loaded), 0);
  cluster_sync();  // the partner's box has arrived as well
  const uint32_t partner = cluster_rank() ^ 1;
  store_test_tile<kTestRowBytes, true>(p.out, blockIdx.y * kTestRows, (blockIdx.x ^ 1) * kCols,
                                       [&](uint32_t i) { return load_remote(&box[i], partner); });
  launch_next_kernel();
  cluster_sync();  // a CTA must not exit while its box is being read
}
