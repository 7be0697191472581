// The policies of a Hopper GEMM: what differs between element types, operands and outputs, as structs that are resolved at compile time. A
// configuration takes one of each, and what one does costs the others neither an instruction nor a register.
//
//   Params     the kernel's parameter, KlGemmSm90 or a struct derived from it    KlGemmSm90
//   OperandA   loads a k-block of A into a stage                                 RowsA: rows of a matrix
//   OperandB   loads a k-block of B, into a stage or to be expanded into one     CopiedB: rows of a weight, as they are
//   Mma        the element type, the wgmma instruction, and promotion            MmaBf16
//   Scaling    what happens to finished accumulators before the epilogue         NoScaling
//   Store      the element type and shape of what is stored                      StoreBf16Rows
//
// tests/emulated/policies.cu has others, which no kernel needs yet.
#pragma once

#include <common/swizzle.cuh>
#include <common/vectors.cuh>
#include <gemm/config_sm90.cuh>

constexpr uint16_t kAllCtas = (1 << KL_SM90_CLUSTER) - 1;

// A is rows of a matrix. The CTAs of a cluster that multicast A load one half each.
struct RowsA {
  template <class Config>
  struct Loader {
    static constexpr uint32_t kTmaBytes = Config::kABytes;  // that arrive in a stage
    const KlTensorMap* map;
    uint32_t rank, row_tile;

    __device__ __forceinline__ Loader(const KlGemmSm90& p, const TileCoord<Config>& at, uint32_t rank)
        : map(&p.x[at.stream]), rank(rank), row_tile(at.row_tile) {}

    // Loads k-block `k` to the address `to`; the mbarrier `full` counts the bytes.
    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const {
      if constexpr (Config::kMode == ClusterMode::kMulticastA) {
        to += rank * (Config::kABytes / 2);
        tma_load_2d_multicast(to, map, k * Config::kBlockK, row_tile * Config::kBlockM + rank * (Config::kBlockM / 2), full, kAllCtas);
      } else {
        tma_load_2d(to, map, k * Config::kBlockK, row_tile * Config::kBlockM, full);
      }
    }
  };
};

// B is rows of a weight, loaded as they are.
struct CopiedB {
  // Stages of the raw ring, and their bytes for a tile of `cols` columns.
  static constexpr uint32_t kRawStages = 0;
  static __host__ __device__ constexpr uint32_t raw_bytes(uint32_t) { return 0; }

  template <class Config>
  struct Loader {
    static constexpr uint32_t kTmaBytes = Config::kBBytes;
    const KlTensorMap* map;
    uint32_t rank, row, apart;

    // Two boxes, because gate and up rows are apart in the weight.
    __device__ __forceinline__ Loader(const KlGemmSm90& p, const TileCoord<Config>& at, uint32_t rank) : map(&p.w[at.stream]), rank(rank) {
      const KlGemmPart& part = p.stream[at.stream].part[at.part];
      const bool paired = part.epilogue == KL_SWIGLU;
      row = part.first_row + at.col_tile * (paired ? Config::kBlockN / 2 : Config::kBlockN);
      apart = paired ? part.out.cols : Config::kBlockN / 2;
    }

    __device__ __forceinline__ void load(uint32_t k, uint32_t to, uint32_t full) const {
      if constexpr (Config::kMode == ClusterMode::kMulticastB) {
        tma_load_2d_multicast(to + rank * (Config::kBBytes / 2), map, k * Config::kBlockK, row + rank * apart, full, kAllCtas);
      } else {
        tma_load_2d(to, map, k * Config::kBlockK, row, full);
        tma_load_2d(to + Config::kBBytes / 2, map, k * Config::kBlockK, row + apart, full);
      }
    }
  };
};

struct MmaBf16 {
  using Element = bf16;
  static constexpr int kInstructionK = 16;  // elements of K per instruction
  // K-blocks after which accumulators are promoted: CUDA cores add them to f32 registers, because tensor cores keep too few bits of a sum
  // of FP8 products. Zero means never, which is right for bf16; one means after every k-block.
  static constexpr int kPromotionInterval = 0;

  template <int kCols>
  static __device__ __forceinline__ void mma(float (&acc)[kCols / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
    wgmma<kCols>(acc, a, b, accumulate);
  }
};

// Operands have no scales.
struct NoScaling {
  template <class Config>
  static __device__ __forceinline__ void apply(const KlGemmSm90&, const TileCoord<Config>&, typename Config::Acc&) {}
};

// The output is rows of bf16. A warp stores its sixteen rows in boxes.
struct StoreBf16Rows {
  using Element = bf16;

  // The columns of a box, for a tile of `cols` columns: the largest power of two that divides them, up to what a box can have.
  static __host__ __device__ constexpr int box_cols(int cols) {
    const int bits = cols | KL_SM90_BOX_COLS;
    return bits & -bits;
  }

  // Writes a box of kCols columns, from accumulator fragments at v on, to the staging buffer that is `offset` after `buffers`. The 16-byte
  // chunks of a row are swizzled as the tensor map of the output says. Each lane supplies stmatrix_x4 with an address.
  template <int kCols>
  static __device__ __forceinline__ void stage(uint32_t buffers, uint32_t offset, uint32_t lane, const float* v) {
    static_assert(kCols % 16 == 0, "stmatrix stores sixteen columns at a time");
    const uint32_t lane_offset = swizzled<kCols * sizeof(Element)>(lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < kCols / 8; j += 2) {
      const float* a = v + 4 * j;
      const uint32_t to = (buffers + lane_offset ^ j * 16) + offset;
      stmatrix_x4(to, pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(a[4], a[5]), pack_bf16(a[6], a[7]));
    }
  }

  // Stores a staged box, whose first element is at (row, col) of the output.
  template <class Config>
  static __device__ __forceinline__ void store(const KlGemmSm90&, const KlTensorMap* map, uint32_t from, uint32_t col, uint32_t row) {
    tma_store_2d(map, from, col, row);
  }
};

struct Bf16Policies {
  using Params = KlGemmSm90;
  using OperandA = RowsA;
  using OperandB = CopiedB;
  using Mma = MmaBf16;
  using Scaling = NoScaling;
  using Store = StoreBf16Rows;
};
