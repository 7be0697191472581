// The policies of a persistent GEMM for compute capability 12.x (RTX 50, RTX PRO Blackwell): TMA loads operands, and warps multiply by
// mma.sync. There is neither wgmma nor multicast, and less than half of Hopper's shared memory: stages have rows of 64 bytes.
#pragma once

#include <common/e4m3.cuh>
#include <common/nvfp4.cuh>
#include <common/swizzle.cuh>
#include <gemm/tma_config.cuh>
#include <gemm/tma_policies.cuh>
#include <ptx/sm120.cuh>

namespace kl::gemm {
// MMA instructions of single warps, with fragments in registers. Sums keep 25 binary places or more, so none of them is promoted.
struct WarpMma {
  static constexpr bool kPerWarp = true;
  static constexpr uint32_t kRowBytes = 64;
  static constexpr int kPromotionInterval = 0;

  // The block scales that a lane supplies to an MMA. By default there are none.
  template <class Config>
  struct Scales {
    struct OfBlocks {};
    __device__ __forceinline__ Scales(const KlGemmTma&, const TileCoord<Config>&, uint32_t) {}
    __device__ __forceinline__ OfBlocks load(uint32_t, uint32_t) const { return {}; }
  };

  // Calls mma(d, a, b0, b1, m, n) for each accumulator fragment d: wgmma tile m, eight-column group n.
  template <class Config, class F>
  static __device__ __forceinline__ void for_each_fragment(typename Config::Acc& acc, const uint32_t (&a)[Config::kMmaM][4],
                                                           const uint32_t (&b)[Config::kBlockN / 16][4], F mma) {
#pragma unroll
    for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
      for (int n = 0; n < Config::kMmaN; n++) {
        float* v = &acc[m][4 * n];
        float d[4] = {v[0], v[1], v[2], v[3]};
        mma(d, a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], m, n);
        v[0] = d[0], v[1] = d[1], v[2] = d[2], v[3] = d[3];
      }
    }
  }
};

struct WarpMmaBf16 : WarpMma {
  using Element = bf16;
  static constexpr int kElementBits = 16, kInstructionK = 16;

  template <class Config>
  static __device__ __forceinline__ void multiply(typename Config::Acc& acc, const uint32_t (&a)[Config::kMmaM][4],
                                                  const uint32_t (&b)[Config::kBlockN / 16][4], typename Scales<Config>::OfBlocks) {
    for_each_fragment<Config>(acc, a, b, [](float(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, int, int) { mma(d, a, b0, b1); });
  }
};

struct WarpMmaE4m3 : WarpMma {
  using Element = e4m3;
  static constexpr int kElementBits = 8, kInstructionK = 32;

  template <class Config>
  static __device__ __forceinline__ void multiply(typename Config::Acc& acc, const uint32_t (&a)[Config::kMmaM][4],
                                                  const uint32_t (&b)[Config::kBlockN / 16][4], typename Scales<Config>::OfBlocks) {
    for_each_fragment<Config>(
        acc, a, b, [](float(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, int, int) { mma_e4m3_scaled(d, a, b0, b1); });
  }
};

// A k-block has two tiles of block scales along K, which follow each other: 128 columns.
constexpr uint32_t kScaleTiles = 2, kScaleTileBytes = KL_SCALE_TILE_BYTES, kScaleBytes = kScaleTiles * kScaleTileBytes;

// The block scales from tile row `row` / 128 of a matrix on. Tile rows past the end repeat the last one: their results are not stored.
__device__ __forceinline__ const uint8_t* scale_tiles(const KlMat& m, uint32_t row) {
  const uint32_t along = ceil_div(static_cast<uint32_t>(m.stride), KL_SCALE_TILE_COLS);
  const uint32_t tile = min(row, m.rows - 1) / KL_SCALE_TILE_ROWS;
  return reinterpret_cast<const uint8_t*>(m.scales) + static_cast<uint64_t>(tile) * along * kScaleTileBytes;
}

// A is rows of e2m1. Their block scales come in tiles of 128 rows, stored as in memory.
struct BlockScaledA : RowsA {
  static constexpr uint32_t scale_bytes(uint32_t rows) { return rows / KL_SCALE_TILE_ROWS * kScaleBytes; }

  template <class Config>
  struct Loader : RowsA::Loader<Config> {
    static constexpr uint32_t kTmaBytes = Config::kABytes + Config::kAScaleBytes;
    const KlMat& x;

    __device__ __forceinline__ Loader(const KlGemmTma& p, const TileCoord<Config>& at, uint32_t rank)
        : RowsA::Loader<Config>(p, at, rank), x(p.stream[at.stream].x) {}

    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const {
      RowsA::Loader<Config>::load(k, to, full);
      to += Config::kABytes + Config::kBBytes;
#pragma unroll
      for (uint32_t i = 0; i < Config::kBlockM / KL_SCALE_TILE_ROWS; i++) {
        const uint8_t* from = scale_tiles(x, this->row_tile * Config::kBlockM + i * KL_SCALE_TILE_ROWS);
        bulk_load(to + i * kScaleBytes, from + k * kScaleBytes, kScaleBytes, full);
      }
    }
  };
};

// B is rows of a weight of e2m1. Each half of a tile's columns, 64 of them, has scales of its own, because gate and up rows are apart.
struct BlockScaledB {
  static constexpr bool kExpands = false, kPreloads = true;
  static constexpr uint32_t scale_bytes(uint32_t) { return 2 * kScaleBytes; }

  template <class Config>
  struct Loader : CopiedB::Loader<Config> {
    static constexpr uint32_t kTmaBytes = Config::kBBytes + Config::kBScaleBytes;
    const KlMat (&w)[KL_GEMM_PARTS];

    __device__ __forceinline__ Loader(const KlGemmTma& p, const TileCoord<Config>& at, uint32_t rank)
        : CopiedB::Loader<Config>(p, at, rank), w(p.stream[at.stream].w) {}

    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const {
      CopiedB::Loader<Config>::load(k, to, full);
      to += Config::kBBytes + Config::kAScaleBytes;
      bulk_load(to, scale_tiles(w[this->first.matrix], this->first.row) + k * kScaleBytes, kScaleBytes, full);
      bulk_load(to + kScaleBytes, scale_tiles(w[this->second.matrix], this->second.row) + k * kScaleBytes, kScaleBytes, full);
    }
  };
};

// B is rows of a weight that the previous kernel may have expanded.
struct WrittenB : CopiedB {
  static constexpr bool kPreloads = false;
};

struct WarpMmaNvfp4 : WarpMma {
  using Element = uint8_t;  // two elements, as tensor maps count them
  static constexpr int kElementBits = 4, kInstructionK = 64;

  // Sixteen bytes of a scale tile have a word, of four blocks, for each of the rows r, r + 32, r + 64 and r + 96. mma_nvf4 takes the scales
  // of sixteen rows of A from the lanes that kA selects, and of eight columns from the lanes that kB selects. With r = 8 (lane % 4) +
  // lane / 4 a lane loads what it supplies to one fragment in two of A, and to one in four of B.
  template <class Config>
  struct Scales {
    static_assert(Config::kBlockN == KL_SCALE_TILE_ROWS, "a half of a tile's columns is half of a scale tile's rows");
    struct OfBlocks {
      uint32_t a;
      uint2 b[2];
    };
    uint32_t a_offset, b_offset[2];

    // `row` is the first of the warp's rows in the tile; its other wgmma tile is 64 rows below.
    __device__ __forceinline__ Scales(const KlGemmTma& p, const TileCoord<Config>& at, uint32_t row) {
      const uint32_t of_lane = row + lane() % 2 * 8 + lane() / 4 + (Config::kMmaM > 1 ? lane() % 4 / 2 * kWgmmaRows : 0);
      a_offset = Config::kABytes + Config::kBBytes + of_lane / KL_SCALE_TILE_ROWS * kScaleBytes + of_lane % 32 * 16 +
                 of_lane % KL_SCALE_TILE_ROWS / 32 * 4;
#pragma unroll
      for (uint32_t half = 0; half < 2; half++) {
        const uint32_t upper = HalfOfB<Config>(p, at, half).row / (KL_SCALE_TILE_ROWS / 2) % 2;  // rows of the scale tile
        b_offset[half] = Config::kABytes + Config::kBBytes + Config::kAScaleBytes + half * kScaleBytes + upper * 8 +
                         (lane() % 4 * 8 + lane() / 4) * 16;
      }
    }

    __device__ __forceinline__ OfBlocks load(uint32_t stage, uint32_t step) const {
      const uint32_t at = stage + step * kScaleTileBytes;
      return {load_shared_word(at + a_offset), {load_shared_pair(at + b_offset[0]), load_shared_pair(at + b_offset[1])}};
    }
  };

  template <class Config>
  static __device__ __forceinline__ void multiply(typename Config::Acc& acc, const uint32_t (&a)[Config::kMmaM][4],
                                                  const uint32_t (&b)[Config::kBlockN / 16][4],
                                                  const typename Scales<Config>::OfBlocks& scales) {
    // Selectors are part of the instruction. The loops around this are unrolled, so one of the branches is left.
    const auto select = [&](float(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1, int m, int n) {
      const uint2 pair = scales.b[n / 8];
      const uint32_t of_b = n / 4 % 2 ? pair.y : pair.x;
      const auto with_a = [&](auto of_m) {
        constexpr int kA = decltype(of_m)::value;
        if (n % 4 == 0) mma_nvf4<kA, 0>(d, a, b0, b1, scales.a, of_b);
        if (n % 4 == 1) mma_nvf4<kA, 1>(d, a, b0, b1, scales.a, of_b);
        if (n % 4 == 2) mma_nvf4<kA, 2>(d, a, b0, b1, scales.a, of_b);
        if (n % 4 == 3) mma_nvf4<kA, 3>(d, a, b0, b1, scales.a, of_b);
      };
      if (m == 0) with_a(std::integral_constant<int, 0>());
      if (m == 1) with_a(std::integral_constant<int, 1>());
    };
    for_each_fragment<Config>(acc, a, b, select);
  }
};

// Boxes with half of Hopper's columns, because shared memory has no room for more.
template <class Rows>
struct NarrowBoxes : Rows {
  static constexpr int kMaxBoxCols = KL_SM120_BOX_COLS * sizeof(bf16) / sizeof(typename Rows::Element);
};

// The output is rows of bf16 or e4m3 or, for SwiGLU, e2m1.
struct StoreRowsSm120 : NarrowBoxes<StoreBf16Rows> {
  static constexpr bool kStoresE4m3 = true, kStoresE2m1 = true;
  using E4m3Rows = NarrowBoxes<StoreE4m3Rows>;
};

template <class Mma_, class OperandA_ = RowsA, class OperandB_ = CopiedB>
struct Sm120Policies : GemmPolicies {
  using Params = KlGemmTma;
  using OperandA = OperandA_;
  using OperandB = OperandB_;
  using Mma = Mma_;
  using Scaling = Scaled;
  using Store = StoreRowsSm120;
};
}  // namespace kl::gemm
