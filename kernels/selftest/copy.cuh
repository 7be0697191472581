// Copies through shared memory in the ways that GEMMs load their operands, for GPUs that have TMA.
//
// Each CTA copies a tile of 64 rows. TMA loads it as a swizzled box and zero-fills what lies past the edge, or bulk copies load it row by
// row. The CTA waits for the previous kernel and lets the next one start early.
#pragma once

#include <common/swizzle.cuh>
#include <common/types.cuh>
#include <ptx/sm90.cuh>

constexpr uint32_t kTestRows = KL_SELFTEST_TILE, kTestRowBytes = 128;
static_assert(sizeof(KlTensorMap) == 128 && alignof(KlTensorMap) == 128, "what the driver calls CUtensorMap");
static_assert(sizeof(KlTestCopy) == 256, "the host states the same");

// Stores a tile with rows of kRowBytes at (row0, col0) of the output. load(i) returns the i-th value of the tile in shared memory order.
template <uint32_t kRowBytes, bool kSwizzled, class Load>
__device__ __forceinline__ void store_test_tile(const KlMat& out, uint64_t row0, uint64_t col0, Load load) {
  constexpr uint32_t kCols = kRowBytes / sizeof(bf16);
  for (uint32_t i = threadIdx.x; i < kTestRows * kCols; i += KL_SELFTEST_THREADS) {
    const uint32_t r = i / kCols, c = i % kCols, chunk = kSwizzled ? swizzled_chunk<kRowBytes>(r, c / 8) : c / 8;
    if (row0 + r < out.rows && col0 + c < out.cols) row_of<uint16_t>(out, row0 + r)[col0 + c] = load(r * kCols + chunk * 8 + c % 8);
  }
}

template <uint32_t kRowBytes, bool kBulk>
__device__ __forceinline__ void copy_test_tile(const KlTestCopy& p, uint16_t* tile, uint32_t loaded) {
  constexpr uint32_t kCols = kRowBytes / sizeof(bf16);
  const uint32_t row0 = blockIdx.y * kTestRows, col0 = blockIdx.x * kCols, to = shared_address(tile);
  if (threadIdx.x == 0) {
    if constexpr (kBulk) {
      const uint32_t rows = min(kTestRows, p.from.rows - row0), bytes = min(kRowBytes, (p.from.cols - col0) * 2);
      mbarrier_arrive_expect_tx(loaded, rows * bytes);
      for (uint32_t r = 0; r < rows; r++) bulk_load(to + r * kRowBytes, row_of<bf16>(p.from, row0 + r) + col0, bytes, loaded);
    } else {
      mbarrier_arrive_expect_tx(loaded, kTestRows * kRowBytes);
      tma_load_2d(to, &p.map, col0, row0, loaded);
    }
  }
  mbarrier_wait(loaded, 0);
  store_test_tile<kRowBytes, !kBulk>(p.out, row0, col0, [&](uint32_t i) { return tile[i]; });
}

__device__ __forceinline__ void copy_tile_as_asked(const KlTestCopy& p) {
  KL_SHARED_ALIGNED(1024, uint16_t, tile, [kTestRows * kTestRowBytes / 2]);
  KL_SHARED_ALIGNED(8, uint64_t, barrier, );
  const uint32_t loaded = shared_address(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_init(loaded, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  if (p.how == KL_TEST_BOX_128) {
    copy_test_tile<kTestRowBytes, false>(p, tile, loaded);
  } else if (p.how == KL_TEST_BOX_64) {
    copy_test_tile<kTestRowBytes / 2, false>(p, tile, loaded);
  } else {
    copy_test_tile<kTestRowBytes, true>(p, tile, loaded);
  }
  launch_next_kernel();
}
