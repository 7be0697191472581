// A copy that uses each Hopper launch feature once: `kiln doctor` and the GPU tests run it to check that the driver, the launch code and
// the GPU agree on tensor maps, clusters, distributed shared memory and programmatic dependent launch.
//
//   kl_selftest   out = x in bf16, with any number of rows and columns. Each CTA of a cluster of two loads a 64x64 box by TMA (128-byte
//                 swizzle, zero-filled beyond the edge) and stores the box that its *partner* loaded, which it reads from the partner's
//                 shared memory. It waits for the previous kernel and lets the next one start early.
//
// Bound: latency; the matrix is a few kilobytes.
#include <common/swizzle.cuh>
#include <common/types.cuh>
#include <ptx/sm90.cuh>

constexpr int kTile = KL_SELFTEST_TILE;
constexpr uint32_t kBoxBytes = kTile * kTile * sizeof(bf16);
static_assert(sizeof(KlTensorMap) == 128 && alignof(KlTensorMap) == 128, "what the driver calls CUtensorMap");
static_assert(sizeof(KlSelftest) == 256, "the host states the same");

KL_ENTRY(kl_selftest, KlSelftest, KL_SELFTEST_THREADS) {
  KL_SHARED_ALIGNED(1024, bf16, box, [kTile * kTile]);
  KL_SHARED_ALIGNED(8, uint64_t, loaded, );
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&loaded), 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(shared_address(&loaded), kBoxBytes);
    tma_load_2d(shared_address(box), &p.x, blockIdx.x * kTile, blockIdx.y * kTile, shared_address(&loaded));
  }
  mbarrier_wait(shared_address(&loaded), 0);
  cluster_sync();  // the partner's box has arrived as well
  const uint32_t partner = cluster_rank() ^ 1;
  const uint64_t row0 = static_cast<uint64_t>(blockIdx.y) * kTile, col0 = static_cast<uint64_t>(blockIdx.x ^ 1) * kTile;
  for (uint32_t i = threadIdx.x; i < kTile * kTile; i += KL_SELFTEST_THREADS) {
    const uint32_t r = i / kTile, c = i % kTile;
    const uint16_t value = load_remote(&box[r * kTile + swizzled_chunk<kTile * sizeof(bf16)>(r, c / 8) * 8 + c % 8], partner);
    if (row0 + r < p.out.rows && col0 + c < p.out.cols) row_of<uint16_t>(p.out, row0 + r)[col0 + c] = value;
  }
  launch_next_kernel();
  cluster_sync();  // a CTA must not exit while its box is being read
}
