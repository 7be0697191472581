// A copy that takes every road of Hopper's once: `kiln doctor` and the tests on a GPU run it to see that the driver, the launch
// code and this machine agree on them.
//
//   kl_selftest   out = x, bf16, any number of rows and columns. Each block of a pair loads a 64x64 box through a tensor map
//                 (128-byte swizzle, zeros beyond the edge), and stores the box that its *partner* loaded, read from the
//                 partner's shared memory. Waits for the kernel before it and releases the one after it early.
#include "common.cuh"
#include "ptx_sm90.cuh"

constexpr int kTile = KL_SELFTEST_TILE;
constexpr uint32_t kBoxBytes = kTile * kTile * sizeof(bf16);
static_assert(sizeof(KlTensorMap) == 128 && alignof(KlTensorMap) == 128, "what the driver calls CUtensorMap");
static_assert(sizeof(KlSelftest) == 256, "the host states the same");

KL_ENTRY(kl_selftest, KlSelftest, KL_SELFTEST_THREADS) {
  __shared__ alignas(1024) bf16 box[kTile * kTile];
  __shared__ alignas(8) uint64_t loaded;
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
  cluster_sync();  // the partner's box is there, too
  const uint32_t partner = cluster_rank() ^ 1;
  const uint64_t row0 = static_cast<uint64_t>(blockIdx.y) * kTile, col0 = static_cast<uint64_t>(blockIdx.x ^ 1) * kTile;
  for (uint32_t i = threadIdx.x; i < kTile * kTile; i += KL_SELFTEST_THREADS) {
    const uint32_t r = i / kTile, c = i % kTile;
    // The swizzle exchanges 16-byte chunks within 128 bytes by the row's last three bits.
    const uint32_t chunk = (c / 8) ^ (r % 8);
    const uint16_t value = load_remote(&box[r * kTile + chunk * 8 + c % 8], partner);
    if (row0 + r < p.out.rows && col0 + c < p.out.cols) row_of<uint16_t>(p.out, row0 + r)[col0 + c] = value;
  }
  launch_next_kernel();
  cluster_sync();  // nobody leaves while its box is being read
}
