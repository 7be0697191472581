// The Hopper GEMM with policies that no kernel of the product has yet, for tests of its main loop (policies.rs).
//
//   test_e4m3_*           FP8 with f32 results, with and without promotion
//   test_expanded_*       weights of e4m3, which are expanded to bf16 on their way into the pipeline
//   test_convolution_*    a 3x3 convolution: A is boxes of an image, at coordinates that a tap has shifted
#include <gemm/mainloop_sm90.cuh>
#include <gemm/policies_sm90.cuh>

// ----------------------------------------------------------------------------------------------------------------- FP8

// The output is rows of f32, so that tests see all bits of the accumulators.
struct StoreF32Rows {
  using Element = float;
  static constexpr bool kStoresE4m3 = false;

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

// ---------------------------------------------------------------------------------------------------------- expanded B

// B is rows of codes, which the codec turns into bf16. Gate and up rows of SwiGLU would take two boxes, as in CopiedB.
template <class Codec>
struct ExpandedB {
  static constexpr uint32_t kRawStages = 3;
  static __host__ __device__ constexpr uint32_t raw_bytes(uint32_t cols) { return cols * Codec::kRowBytes; }

  template <class Config>
  struct Loader {
    static constexpr uint32_t kTmaBytes = 0;  // none of them arrive in a stage
    const KlTensorMap* map;
    uint32_t row;

    __device__ __forceinline__ Loader(const KlGemmSm90& p, const TileCoord<Config>& at, uint32_t)
        : map(&p.w[at.stream][0]), row(at.col_tile * Config::kBlockN) {}

    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const {
      tma_load_2d(to, map, k * Codec::kRowBytes, row, full);
    }
  };

  // Expands the k-block at `raw` into the rows of B at `to`, where the 16-byte chunks of a row are swizzled as wgmma expects them. A
  // thread takes one block of sixteen elements after the other; those of a row's neighbouring threads are beside each other.
  template <class Config>
  static __device__ __forceinline__ void expand(uint32_t to, uint32_t raw, uint32_t thread) {
    constexpr uint32_t kBlocks = Config::kBlockK / 16;  // of a row
    // Two at a time, because the producer has few registers.
#pragma unroll 2
    for (uint32_t i = thread; i < Config::kBlockN * kBlocks; i += 32 * Config::kWriterWarps) {
      const uint32_t row = i / kBlocks, block = i % kBlocks;
      uint32_t pairs[8];
      Codec::decode(raw + row * Codec::kRowBytes, block, pairs);
#pragma unroll
      for (uint32_t chunk = 0; chunk < 2; chunk++) {
        const uint32_t* v = &pairs[4 * chunk];
        store_shared(to + swizzled<kSwizzleRowBytes>(row, 2 * block + chunk), make_uint4(v[0], v[1], v[2], v[3]));
      }
    }
  }
};

// Weights of e4m3 for activations of bf16. All values are exact in bf16.
struct E4m3Codec {
  static constexpr uint32_t kRowBytes = 64;  // of a k-block

  // Decodes the block of sixteen elements with that index.
  static __device__ __forceinline__ void decode(uint32_t row, uint32_t block, uint32_t (&pairs)[8]) {
    const float4 raw = load_shared(row + 16 * block);
    const uint32_t words[4] = {__float_as_uint(raw.x), __float_as_uint(raw.y), __float_as_uint(raw.z), __float_as_uint(raw.w)};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t two = words[i / 2] >> i % 2 * 16, apart = (two & 0xff) | (two & 0xff00) << 8;
      // The bits of a code in the places that they have in bf16, whose exponents are larger by 120.
      const float2 v = unpack_pair((apart & 0x00800080) << 8 | (apart & 0x007f007f) << 4);
      pairs[i] = pack_bf16(v.x * 0x1p120f, v.y * 0x1p120f);
    }
  }
};

struct ExpandedPolicies {
  using Params = KlGemmSm90;
  using OperandA = RowsA;
  using OperandB = ExpandedB<E4m3Codec>;
  using Mma = MmaBf16;
  using Scaling = Scaled;
  using Store = StoreBf16Rows;
};

using Expanded256x192 = GemmConfig<ExpandedPolicies, 256, 192, 64, 2, 3, ClusterMode::kMulticastA>;
using Expanded128x160 = GemmConfig<ExpandedPolicies, 128, 160, 64, 2, 4, ClusterMode::kSplitK>;
KL_ENTRY(test_expanded_256x192, KlGemmSm90, Expanded256x192::kThreads, 1) { gemm<Expanded256x192>(p); }
KL_ENTRY(test_expanded_128x160, KlGemmSm90, Expanded128x160::kThreads, 1) { gemm<Expanded128x160>(p); }
