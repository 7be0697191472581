// The policies of a persistent GEMM with TMA: what differs between element types, operands and outputs, as structs that are resolved at
// compile time. A configuration takes one of each. A policy costs configurations without it neither an instruction nor a register.
//
//   Params     the kernel's parameter, KlGemmTma or a struct derived from it    KlGemmTma
//   OperandA   loads a k-block of A into a stage, or windows of A that           RowsA: rows of a matrix
//              several k-blocks multiply
//   OperandB   loads a k-block of B                                              CopiedB: rows of a weight; ExpandedB
//                                                                                (expand_sm90.cuh): as soon as its rows are expanded
//   Mma        the element type, the MMA instruction, and promotion              MmaBf16, MmaE4m3
//   Scaling    whether accumulators are multiplied by scales                     NoScaling, Scaled
//   Store      the element type, shape and place of the output                   StoreBf16Rows, StoreBf16OrE4m3Rows
//   Epilogue   what to do with the accumulators of a finished tile               GemmEpilogue (tma_epilogue.cuh)
//
// Policies for compute capability 12.x are in policies_sm120.cuh, policies of convolutions in conv/policies_sm90.cuh. More, which no kernel
// needs yet, are in tests/emulated/policies.cu.
#pragma once

#include <common/e4m3.cuh>
#include <common/reduce.cuh>
#include <common/swizzle.cuh>
#include <common/vectors.cuh>
#include <gemm/tma_config.cuh>

namespace kl::gemm {
constexpr uint16_t kAllCtas = (1 << KL_SM90_CLUSTER) - 1;

// The producer's position in the k-blocks of a tile.
struct BlockCursor {
  uint32_t k;

  __device__ __forceinline__ BlockCursor(const KlGemmTma&, uint32_t k) : k(k) {}
  __device__ __forceinline__ operator uint32_t() const { return k; }
  __device__ __forceinline__ void advance() { k++; }
};

// A is rows of a matrix. The CTAs of a cluster that multicast A load one half each.
struct RowsA {
  using Cursor = BlockCursor;
  // Windows in shared memory, and the bytes of a window for the given rows.
  static constexpr int kWindows = 0;
  static constexpr uint32_t window_bytes(uint32_t) { return 0; }
  // Bytes of block scales that a stage has for the given rows.
  static constexpr uint32_t scale_bytes(uint32_t) { return 0; }
  static __device__ __forceinline__ const KlTensorMap* first_map(const KlGemmTma& p) { return &p.x[0]; }
  // The descriptor of 64 rows at an address; kTileBytes is the distance to the next 64.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) { return wgmma_descriptor(address); }
  static constexpr uint32_t kTileBytes = kWgmmaTileBytes;

  template <class Config>
  struct Loader {
    static constexpr uint32_t kTmaBytes = Config::kABytes;  // bytes that arrive in a stage
    const KlTensorMap* map;
    uint32_t rank, row_tile;

    __device__ __forceinline__ Loader(const KlGemmTma& p, const TileCoord<Config>& at, uint32_t rank)
        : map(&p.x[at.stream]), rank(rank), row_tile(at.row_tile) {}

    // Loads k-block `k` to the address `to`; the mbarrier `full` counts the bytes.
    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const { load_from(k * Config::kMapCols, to, full); }

    // Loads a k-block's bytes from column `col` on.
    __device__ __forceinline__ void load_from(uint32_t col, uint32_t to, uint32_t full) const {
      if constexpr (Config::kMode == ClusterMode::kMulticastA) {
        to += rank * (Config::kABytes / 2);
        tma_load_2d_multicast(to, map, col, row_tile * Config::kBlockM + rank * (Config::kBlockM / 2), full, kAllCtas);
      } else {
        tma_load_2d(to, map, col, row_tile * Config::kBlockM, full);
      }
    }
  };
};

// Locates the weight rows that make up one half of a tile's columns. Gate and up rows are apart, or in two matrices.
template <class Config>
struct HalfOfB {
  const KlTensorMap* map;
  uint32_t matrix, row, dtype;

  __device__ __forceinline__ HalfOfB(const KlGemmTma& p, const TileCoord<Config>& at, uint32_t half) {
    constexpr uint32_t kHalfN = Config::kBlockN / 2;
    const KlOutputRange& part = p.stream[at.stream].part[at.part];
    const bool paired = part.epilogue == KL_SWIGLU;
    const KlGemmRows& rows = part.w[paired ? half : 0];
    map = &p.w[at.stream][rows.matrix], matrix = rows.matrix, dtype = rows.dtype;
    row = rows.first + (paired ? at.col_tile * kHalfN : (2 * at.col_tile + half) * kHalfN);
  }

  __device__ __forceinline__ bool is_expanded() const { return dtype != KL_BF16; }

  // Moves to the rows of the LoRA up matrix that belong to the same columns.
  __device__ __forceinline__ void point_at_up(const KlGemmTma& p, const TileCoord<Config>& at, uint32_t half) {
    const KlOutputRange& part = p.stream[at.stream].part[at.part];
    const bool second = part.epilogue == KL_SWIGLU && half == 1;
    row = row - part.w[second].first + part.first_col + (second ? part.out.cols : 0);
    map = &p.up[at.stream];
  }
};

// B is rows of a weight, loaded unchanged. The CTAs of a cluster that multicast B load one half each.
struct CopiedB {
  static constexpr bool kExpands = false;
  static constexpr bool kPreloads = true;  // while the previous kernel ends, on which weights do not depend
  static constexpr uint32_t scale_bytes(uint32_t) { return 0; }

  template <class Config>
  struct Loader {
    static constexpr bool kMulticast = Config::kMode == ClusterMode::kMulticastB;
    static constexpr uint32_t kTmaBytes = Config::kBBytes;
    uint32_t rank;
    HalfOfB<Config> first, second;

    __device__ __forceinline__ Loader(const KlGemmTma& p, const TileCoord<Config>& at, uint32_t rank)
        : rank(rank), first(p, at, kMulticast ? rank : 0), second(p, at, 1) {}

    // Waits until k-block `k` can be loaded.
    __device__ __forceinline__ void wait(uint32_t, bool) const {}

    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const { load_from(k * Config::kMapCols, to, full); }

    // Loads a k-block's bytes from column `col` on.
    __device__ __forceinline__ void load_from(uint32_t col, uint32_t to, uint32_t full) const {
      if constexpr (kMulticast) {
        tma_load_2d_multicast(to + rank * (Config::kBBytes / 2), first.map, col, first.row, full, kAllCtas);
      } else {
        tma_load_2d(to, first.map, col, first.row, full);
        tma_load_2d(to + Config::kBBytes / 2, second.map, col, second.row, full);
      }
    }
  };
};

// MMA instructions of whole warpgroups, with operands in shared memory.
struct WarpgroupMma {
  static constexpr bool kPerWarp = false;
  static constexpr uint32_t kRowBytes = kSwizzleRowBytes;  // of an operand in a stage
};

struct MmaBf16 : WarpgroupMma {
  using Element = bf16;
  static constexpr int kElementBits = 16;
  static constexpr int kInstructionK = 16;  // elements of K per instruction
  // K-blocks after which accumulators are promoted: CUDA cores add them to f32 registers, because tensor cores keep too few bits of a sum
  // of FP8 products. Zero means never, which is right for bf16.
  static constexpr int kPromotionInterval = 0;

  template <int kCols>
  static __device__ __forceinline__ void mma(float (&acc)[kCols / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
    wgmma<kCols>(acc, a, b, accumulate);
  }
};

// Issues the MMAs of a k-block, or of the first kMmaK steps of its K, and commits them as one group. There are kTiles wgmma tiles, whose
// rows of A are at `a`.
template <class Config, int kMmaK = Config::kMmaK, int kTiles>
__device__ __forceinline__ void mma_k_block(float (&acc)[kTiles][Config::kBlockN / 2], uint32_t a, uint32_t b, bool accumulate) {
  // The descriptor step from one instruction to the next, within the rows of a stage.
  constexpr uint64_t kStep = Config::Mma::kInstructionK * sizeof(typename Config::Mma::Element) / kDescriptorUnitBytes;
  const uint64_t b_descriptor = wgmma_descriptor(b);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kMmaK; i++) {
#pragma unroll
    for (int m = 0; m < kTiles; m++) {
      const uint64_t a_descriptor = Config::OperandA::descriptor(a + m * Config::OperandA::kTileBytes);
      Config::Mma::template mma<Config::kBlockN>(acc[m], a_descriptor + kStep * i, b_descriptor + kStep * i, accumulate || i > 0);
    }
  }
  wgmma_commit();
}

// Addresses of a lane's rows of both operands in a stage, for ldmatrix: sixteen rows of A, or twice eight of B, by two chunks of 16 bytes.
// `row` is the first of the warp's rows. The caller passes the lane so that it can hide it from the compiler and save registers.
template <class Config>
struct WarpFragments {
  static constexpr uint32_t kRowBytes = Config::Mma::kRowBytes, kStepBytes = 32, kSteps = kRowBytes / kStepBytes;
  uint32_t a_offset, b_offset;

  __device__ __forceinline__ WarpFragments(uint32_t row, uint32_t lane)
      : a_offset(swizzled<kRowBytes>(row + lane % 16, lane / 16)),
        b_offset(Config::kABytes + swizzled<kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2)) {}

  __device__ __forceinline__ void load_a(uint32_t stage, uint32_t step, uint32_t (&a)[Config::kMmaM][4]) const {
#pragma unroll
    for (int m = 0; m < Config::kMmaM; m++) ldmatrix_x4(a[m], (stage + a_offset ^ step * kStepBytes) + m * kWgmmaRows * kRowBytes);
  }

  // Loads the fragments of columns 16 n to 16 n + 15.
  __device__ __forceinline__ void load_b(uint32_t stage, uint32_t step, int n, uint32_t (&b)[4]) const {
    ldmatrix_x4(b, (stage + b_offset ^ step * kStepBytes) + n * 16 * kRowBytes);
  }
};

// Adds the first `steps` steps of a LoRA block, which is bf16 whatever the type of the k-blocks. It uses mma.sync, because wgmma on
// accumulators that other instructions have written makes ptxas serialize the main loop as well.
template <class Config>
__device__ __forceinline__ void add_lora_block(typename Config::Acc& acc, uint32_t row, uint32_t lane, uint32_t stage, uint32_t steps) {
  const WarpFragments<Config> fragments(row, lane);
#pragma unroll 1
  for (uint32_t step = 0; step < steps; step++) {
    uint32_t a[Config::kMmaM][4];
    fragments.load_a(stage, step, a);
#pragma unroll
    for (int n = 0; n < Config::kMmaN; n += 2) {
      uint32_t b[4];
      fragments.load_b(stage, step, n / 2, b);
#pragma unroll
      for (int i = 0; i < 2 * Config::kMmaM; i++) {
        float* v = &acc[i / 2][4 * (n + i % 2)];
        float d[4] = {v[0], v[1], v[2], v[3]};
        mma(d, a[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
        v[0] = d[0], v[1] = d[1], v[2] = d[2], v[3] = d[3];
      }
    }
  }
}

// With an interval of one, sums are exact up to f32. Without promotion tensor cores keep thirteen binary places of a sum of e4m3 products,
// so long sums of one sign come out too small.
template <int kInterval>
struct MmaE4m3 : WarpgroupMma {
  using Element = e4m3;
  static constexpr int kElementBits = 8;
  static constexpr int kInstructionK = 32, kPromotionInterval = kInterval;

  template <int kCols>
  static __device__ __forceinline__ void mma(float (&acc)[kCols / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
    wgmma_e4m3<kCols>(acc, a, b, accumulate);
  }
};

// For operands without scales.
struct NoScaling {
  static constexpr bool kScaled = false;
};

// For operands with scales. The epilogue multiplies accumulators by `alpha` of the rows of B, and by row scales, if there are any.
struct Scaled {
  static constexpr bool kScaled = true;
};

// The first row of a warpgroup or warp in an output that consists of rows.
template <class Config>
struct RowOrigin {
  uint32_t row;

  // Begins at row `first` of a tile.
  __device__ __forceinline__ RowOrigin(const KlGemmTma&, const TileCoord<Config>& at, uint32_t first)
      : row(at.row_tile * Config::kBlockM + first) {}

  // Loads a box of the residual, from column `col` on.
  __device__ __forceinline__ void load(uint32_t to, const KlTensorMap* map, uint32_t col, uint32_t full) const {
    tma_load_2d(to, map, col, row, full);
  }

  // Stores a staged box `skipped` rows further down.
  __device__ __forceinline__ void store(const KlTensorMap* map, uint32_t from, uint32_t col, uint32_t skipped) const {
    tma_store_2d(map, from, col, row + skipped);
  }
};

// The output is rows of bf16. A warp stores its sixteen rows in boxes.
struct StoreBf16Rows {
  template <class Config>
  using Origin = RowOrigin<Config>;
  using Element = bf16;
  static constexpr bool kStoresE4m3 = false, kStoresE2m1 = false;  // as well, for outputs of that type
  static constexpr int kMaxBoxCols = KL_SM90_BOX_COLS;

  // Writes a box of kCols columns, from the accumulator fragments at `v`, to the staging buffer that is `offset` after `buffers`. The
  // 16-byte chunks of a row are swizzled as in the output's tensor map. Each lane supplies stmatrix_x4 with an address.
  template <int kCols>
  static __device__ __forceinline__ void stage(const KlGemmTma&, uint32_t buffers, uint32_t offset, uint32_t lane, const float* v) {
    static_assert(kCols % 16 == 0, "stmatrix stores sixteen columns at a time");
    const uint32_t lane_offset = swizzled<kCols * sizeof(Element)>(lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < kCols / 8; j += 2) {
      const float* a = v + 4 * j;
      const uint32_t to = (buffers + lane_offset ^ j * 16) + offset;
      stmatrix_x4(to, pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(a[4], a[5]), pack_bf16(a[6], a[7]));
    }
  }
};

// The output is rows of e4m3, in boxes of twice as many columns.
struct StoreE4m3Rows : StoreBf16Rows {
  using Element = e4m3;
  static constexpr int kMaxBoxCols = 2 * KL_SM90_BOX_COLS;

  // Writes a box, as StoreBf16Rows does. A lane has two of every eight columns, a byte each. The lanes of a quad exchange the bytes of four
  // fragments, so that each can write eight bytes.
  template <int kCols>
  static __device__ __forceinline__ void stage(const KlGemmTma& p, uint32_t buffers, uint32_t offset, uint32_t lane, const float* v) {
    static_assert(kCols % 32 == 0, "a quad exchanges four fragments of eight columns");
    count_saturated<kCols / 2>(p.saturated, v);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t row = lane / 4 + 8 * half;
#pragma unroll
      for (int j = 0; j < kCols / 8; j += 4) {
        const float* a = v + 4 * j + 2 * half;
        const uint2 bytes = transpose_quad_halves(cvt_e4m3x2(a[0], a[1]) | cvt_e4m3x2(a[4], a[5]) << 16,
                                                  cvt_e4m3x2(a[8], a[9]) | cvt_e4m3x2(a[12], a[13]) << 16);
        const uint32_t chunk = j / 2 + lane % 4 / 2;  // of sixteen bytes
        store_shared(buffers + offset + swizzled<kCols>(row, chunk) + lane % 2 * 8, bytes);
      }
    }
  }
};

// The output is rows of bf16 or of e4m3.
struct StoreBf16OrE4m3Rows : StoreBf16Rows {
  static constexpr bool kStoresE4m3 = true;
  using E4m3Rows = StoreE4m3Rows;
};

template <class Config>
struct GemmEpilogue;

// Policies that all GEMMs have in common.
struct GemmPolicies {
  template <class Config>
  using Epilogue = GemmEpilogue<Config>;
  static constexpr uint32_t kExchangeBytes = 0;  // per warpgroup, in the epilogue
};

struct Bf16Policies : GemmPolicies {
  using Params = KlGemmTma;
  using OperandA = RowsA;
  using OperandB = CopiedB;
  using Mma = MmaBf16;
  using Scaling = NoScaling;
  using Store = StoreBf16Rows;
};

// FP8: e4m3 by e4m3. `kInterval` is the promotion interval.
template <int kInterval>
struct Fp8Policies : GemmPolicies {
  using Params = KlGemmTma;
  using OperandA = RowsA;
  using OperandB = CopiedB;
  using Mma = MmaE4m3<kInterval>;
  using Scaling = Scaled;
  using Store = StoreBf16OrE4m3Rows;
};
}  // namespace kl::gemm
