// The Hopper GEMM with policies that no kernel of the product has yet, for tests of its main loop (policies.rs).
//
//   test_e4m3_*           FP8 with f32 results, with and without promotion
//   test_convolution_*    a 3x3 convolution: A is boxes of an image, at coordinates that a tap has shifted
#include <gemm/mainloop_sm90.cuh>
#include <gemm/policies_sm90.cuh>

// ----------------------------------------------------------------------------------------------------------------- FP8

// The output is rows of f32, so that tests see all bits of the accumulators.
struct StoreF32Rows {
  using Element = float;
  static constexpr bool kStoresE4m3 = false, kStoresE2m1 = false;

  // As StoreBf16Rows; the 128 bytes that the swizzle allows are 32 columns.
  static __host__ __device__ constexpr int box_cols(int cols) {
    const int bits = cols | 32;
    return bits & -bits;
  }

  template <int kCols>
  static __device__ __forceinline__ void stage(const KlGemmSm90&, uint32_t buffers, uint32_t offset, uint32_t lane, const float* v) {
#pragma unroll
    for (int i = 0; i < kCols / 2; i++) {
      // Accumulator i of a lane is in fragment i / 4, which has two rows of two columns for it.
      const uint32_t row = lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const uint32_t to = swizzled<kCols * sizeof(Element)>(row, col / 4) + col % 4 * sizeof(Element);
      store_shared(buffers + offset + to, __float_as_uint(v[i]));
    }
  }

  template <class Config>
  static __device__ __forceinline__ void store(const KlGemmSm90&, const KlTensorMap* map, uint32_t from, uint32_t col, uint32_t row) {
    tma_store_2d(map, from, col, row);
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
KL_ENTRY(test_e4m3_promoted_256x128, KlGemmSm90, Promoted256x128::kThreads, 1) { gemm<Promoted256x128>(p); }
KL_ENTRY(test_e4m3_promoted_128x192, KlGemmSm90, Promoted128x192::kThreads, 1) { gemm<Promoted128x192>(p); }
KL_ENTRY(test_e4m3_unpromoted_256x128, KlGemmSm90, Unpromoted256x128::kThreads, 1) { gemm<Unpromoted256x128>(p); }
KL_ENTRY(test_e4m3_unpromoted_128x192, KlGemmSm90, Unpromoted128x192::kThreads, 1) { gemm<Unpromoted128x192>(p); }

// --------------------------------------------------------------------------------------------------------- convolution

// A tile is a block of pixels, kTileWidth of them in a line: what a warp stores at once.
constexpr uint32_t kTileWidth = KL_SM90_STORE_ROWS, kTaps = 3;

template <class Config>
constexpr uint32_t kTileLines = Config::kBlockM / kTileWidth;

struct ConvolutionParams : KlGemmSm90 {
  uint32_t tiles_across;    // tiles of pixels beside each other in the image
  uint32_t channel_blocks;  // of kBlockK input channels
};

// A is an image [line, column, channel], of which `x` is a map of rank three. A k-block is kBlockK channels of one tap. The box of a tile
// is shifted by the tap; what of it lies outside of the image is filled with zeros, which is the padding.
struct TapsA {
  static constexpr uint32_t scale_bytes(uint32_t) { return 0; }

  template <class Config>
  struct Loader {
    static constexpr uint32_t kTmaBytes = Config::kABytes;
    const KlTensorMap* map;
    uint32_t rank, channel_blocks;
    int32_t x, y;  // of the first pixel at the first tap

    __device__ __forceinline__ Loader(const ConvolutionParams& p, const TileCoord<Config>& at, uint32_t rank)
        : map(&p.x[at.stream]), rank(rank), channel_blocks(p.channel_blocks), x(at.row_tile % p.tiles_across * kTileWidth - kTaps / 2),
          y(at.row_tile / p.tiles_across * kTileLines<Config> - kTaps / 2) {}

    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const {
      const uint32_t tap = k / channel_blocks, channel = k % channel_blocks * Config::kBlockK;
      const int32_t tap_x = x + tap % kTaps, tap_y = y + tap / kTaps;
      if constexpr (Config::kMode == ClusterMode::kMulticastA) {
        to += rank * (Config::kABytes / 2);
        tma_load_3d_multicast(to, map, channel, tap_x, tap_y + rank * (kTileLines<Config> / 2), full, kAllCtas);
      } else {
        tma_load_3d(to, map, channel, tap_x, tap_y, full);
      }
    }
  };
};

// The output is an image, of which the sixteen rows of a warp are a line of pixels.
struct StoreBf16Pixels : StoreBf16Rows {
  template <class Config>
  static __device__ __forceinline__ void store(const ConvolutionParams& p, const KlTensorMap* map, uint32_t from, uint32_t col,
                                               uint32_t row) {
    const uint32_t tile = row / Config::kBlockM, line = row % Config::kBlockM / kTileWidth;
    tma_store_3d(map, from, col, tile % p.tiles_across * kTileWidth, tile / p.tiles_across * kTileLines<Config> + line);
  }
};

struct ConvolutionPolicies {
  using Params = ConvolutionParams;
  using OperandA = TapsA;
  using OperandB = CopiedB;
  using Mma = MmaBf16;
  using Scaling = NoScaling;
  using Store = StoreBf16Pixels;
};

using Convolution256x128 = GemmConfig<ConvolutionPolicies, 256, 128, 64, 2, 4, ClusterMode::kMulticastA>;
using Convolution128x256 = GemmConfig<ConvolutionPolicies, 128, 256, 64, 2, 4, ClusterMode::kMulticastB>;
KL_ENTRY(test_convolution_256x128, ConvolutionParams, Convolution256x128::kThreads, 1) { gemm<Convolution256x128>(p); }
KL_ENTRY(test_convolution_128x256, ConvolutionParams, Convolution128x256::kThreads, 1) { gemm<Convolution128x256>(p); }
