// The Hopper GEMM with policies that no product kernel has yet, to test its main loop (policies.rs).
//
//   test_e4m3_*           FP8 with f32 results, with and without promotion
#include <gemm/tma_mainloop.cuh>
#include <gemm/tma_policies.cuh>

using namespace kl::gemm;

// ----------------------------------------------------------------------------------------------------------------- FP8

// Stores output rows in f32, so tests see all bits of the accumulators.
struct StoreF32Rows {
  template <class Config>
  using Origin = RowOrigin<Config>;
  using Element = float;
  static constexpr bool kStoresE4m3 = false, kStoresE2m1 = false;
  static constexpr int kMaxBoxCols = 32;  // 128 bytes, the limit of the swizzle

  template <int kCols>
  static __device__ __forceinline__ void stage(const KlGemmTma&, uint32_t buffers, uint32_t offset, uint32_t lane, const float* v) {
#pragma unroll
    for (int i = 0; i < kCols / 2; i++) {
      // Accumulator i of a lane is in fragment i / 4, where the lane has two rows of two columns.
      const uint32_t row = lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const uint32_t to = swizzled<kCols * sizeof(Element)>(row, col / 4) + col % 4 * sizeof(Element);
      store_shared(buffers + offset + to, __float_as_uint(v[i]));
    }
  }
};

template <int kInterval>
struct E4m3Policies : Fp8Policies<kInterval> {
  using Store = StoreF32Rows;
};

using Promoted256x128 = GemmConfig<E4m3Policies<1>, 256, 128, 128, 2, 4, ClusterMode::kMulticastA>;
using Promoted128x192 = GemmConfig<E4m3Policies<1>, 128, 192, 128, 2, 4, ClusterMode::kMulticastB>;
using Unpromoted256x128 = GemmConfig<E4m3Policies<0>, 256, 128, 128, 2, 4, ClusterMode::kMulticastA>;
using Unpromoted128x192 = GemmConfig<E4m3Policies<0>, 128, 192, 128, 2, 4, ClusterMode::kMulticastB>;
KL_ENTRY(test_e4m3_promoted_256x128, KlGemmTma, Promoted256x128::kThreads, 1) { gemm<Promoted256x128>(p); }
KL_ENTRY(test_e4m3_promoted_128x192, KlGemmTma, Promoted128x192::kThreads, 1) { gemm<Promoted128x192>(p); }
KL_ENTRY(test_e4m3_unpromoted_256x128, KlGemmTma, Unpromoted256x128::kThreads, 1) { gemm<Unpromoted256x128>(p); }
KL_ENTRY(test_e4m3_unpromoted_128x192, KlGemmTma, Unpromoted128x192::kThreads, 1) { gemm<Unpromoted128x192>(p); }
