// Quantized weights for bf16 activations (mixed input): the policy of a Hopper GEMM that expands its operand B while it runs.
//
// Warps of the producer warpgroup that have no loads to issue turn codes into bf16, which is exact except for tensor and row scales, and
// write them to a buffer in global memory. From there the producer loads them as bf16 weights, as soon as they are written: from L2, which
// keeps most of what was written shortly before. So a weight is expanded once, for all rows of the activations. Expanding it into the
// pipeline of every CTA takes more time than the MMAs of a k-block have: the tensor cores leave little of the bandwidth of shared memory
// (bench/LOG.md).
#pragma once

#include <common/expand.cuh>
#include <common/math.cuh>
#include <gemm/tma_config.cuh>
#include <gemm/tma_policies.cuh>

namespace kl::gemm {
// B is rows of a weight. Each half of a tile's columns is bf16, or it is e4m3 or e2m1, which are expanded.
struct ExpandedB {
  static constexpr bool kExpands = true;
  static constexpr bool kPreloads = false;  // expanded rows are not there yet
  static constexpr uint32_t scale_bytes(uint32_t) { return 0; }

  static __device__ __forceinline__ uint32_t* counters(const KlGemmTma& p) { return reinterpret_cast<uint32_t*>(p.expansion.counters); }

  // The flag for a column tile, counted over all streams, and the group of k-blocks that contains `k`.
  static __device__ __forceinline__ uint32_t* flag(const KlGemmTma& p, uint32_t tile, uint32_t k) {
    const uint32_t groups = ceil_div(p.schedule.k_blocks, KL_EXPANSION_GROUP);
    return counters(p) + KL_EXPANSION_COUNTERS + tile * groups + k / KL_EXPANSION_GROUP;
  }

  // The column tiles of a stream.
  static __device__ __forceinline__ uint32_t col_tiles(const KlGemmStream& s) {
    uint32_t tiles = 0;
#pragma unroll
    for (uint32_t i = 0; i < KL_GEMM_PARTS; i++) tiles += s.part[i].tiles;
    return tiles;
  }

  template <class Config>
  struct Loader : CopiedB::Loader<Config> {
    const KlGemmTma& p;
    uint32_t* flags;  // of the tile; null if nothing of it is expanded

    __device__ __forceinline__ Loader(const KlGemmTma& p, const TileCoord<Config>& at, uint32_t rank)
        : CopiedB::Loader<Config>(p, at, rank), p(p), flags(nullptr) {
      uint32_t tile = at.col_tile;
      for (uint32_t i = 0; i < at.part; i++) tile += p.stream[at.stream].part[i].tiles;
      if (tile >= col_tiles(p.stream[at.stream])) {
        // The last cluster may have one tile too many. Nothing of it is stored and nobody waits for its rows, so they are not read either:
        // past the end of a weight TMA has zeros.
        const auto rows = [&](uint32_t matrix) { return p.stream[at.stream].w[matrix].rows; };
        this->first.row = rows(this->first.matrix), this->second.row = rows(this->second.matrix);
        return;
      }
      const bool expanded = HalfOfB<Config>(p, at, 0).is_expanded() || HalfOfB<Config>(p, at, 1).is_expanded();
      if (expanded) flags = flag(p, tile + (at.stream ? col_tiles(p.stream[0]) : 0), 0);
    }

    // Waits until k-block `k` can be loaded. `first` is the first one of a tile.
    __device__ __forceinline__ void wait(uint32_t k, bool first) const {
      if (!flags || !first && k % KL_EXPANSION_GROUP) return;
      while (load_acquire(flags + k / KL_EXPANSION_GROUP) < units_per_flag<Config>()) {
      }
      fence_proxy_async_global();
    }
  };

  // The units that a flag counts: for each half of a tile's columns, KL_EXPANSION_ROWS rows by a group of k-blocks.
  template <class Config>
  static __host__ __device__ constexpr uint32_t units_per_flag() { return 2 * ceil_div<uint32_t>(Config::kBlockN / 2, KL_EXPANSION_ROWS); }

  // Expands units; run by the producer warpgroup's warps that issue no loads.
  template <class Config>
  struct Expander {
    static constexpr uint32_t kGroupCols = KL_EXPANSION_GROUP * Config::kBlockK;
    // A lane expands sixteen codes of a row at a time. It has few loads in flight, because producers have few registers.
    static constexpr uint32_t kBlockCols = 16, kLanesPerRow = kGroupCols / kBlockCols, kRowsAtOnce = 32 / kLanesPerRow;
    static constexpr uint32_t kInFlight = Config::Registers::kProducer < 56 ? 2 : Config::Registers::kProducer < 104 ? 4 : 8;
    const KlGemmTma& p;

    __device__ __forceinline__ void run() const {
      if (!p.expansion.units) return;
      wait_for_previous_kernel();  // which may still read the buffer
      // A warp takes the next unit before it expands the present one.
      for (uint32_t next = take(), unit; (unit = __reduce_add_sync(~0u, next)) < p.expansion.units;) {
        next = take();
        expand(unit);
      }
    }

    // Called by every warp of the producer warpgroup when it has taken all units, or waited for all it needs. The last one in the grid
    // resets the counters.
    __device__ __forceinline__ void finish() const {
      if (!p.expansion.units) return;
      __syncwarp();
      uint32_t before = 0;
      if (lane() == 0) {
        __threadfence();
        before = atomicAdd(counters(p) + 1, 1);
      }
      if (__reduce_add_sync(~0u, before) + 1 < gridDim.x * kWarpgroupWarps) return;
      __threadfence();
      const uint32_t tiles = col_tiles(p.stream[0]) + col_tiles(p.stream[1]);
      const uint32_t flags = tiles * ceil_div(p.schedule.k_blocks, KL_EXPANSION_GROUP);
      for (uint32_t i = lane(); i < KL_EXPANSION_COUNTERS + flags; i += 32) counters(p)[i] = 0;
    }

   private:
    __device__ __forceinline__ uint32_t take() const { return lane() == 0 ? atomicAdd(counters(p), 1) : 0; }

    __device__ __forceinline__ void expand(uint32_t unit) const {
      constexpr uint32_t kUnits = units_per_flag<Config>();
      const uint32_t groups = ceil_div(p.schedule.k_blocks, KL_EXPANSION_GROUP);
      const uint32_t first_tiles = col_tiles(p.stream[0]), tiles = first_tiles + col_tiles(p.stream[1]);
      // All column tiles of a wave get their first k-blocks before any gets the next ones.
      const uint32_t wave = unit / (kUnits * p.expansion.tiles * groups), first = wave * p.expansion.tiles;
      const uint32_t width = kUnits * min(p.expansion.tiles, tiles - first), within = unit - kUnits * first * groups;
      const uint32_t step = within / width, in_step = within % width, tile = first + in_step / kUnits, part = in_step % kUnits;
      // With split-K the second half of the k-blocks is needed at the same time.
      const uint32_t group = Config::kSplitK ? step / 2 + step % 2 * ceil_div(groups, 2u) : step;
      const uint32_t stream = tile >= first_tiles;
      const HalfOfB<Config> half(p, TileCoord<Config>(p, stream, tile - (stream ? first_tiles : 0)), part % 2);
      const uint32_t row = half.row + part / 2 * KL_EXPANSION_ROWS;
      if (half.dtype == KL_E4M3) expand_rows<Fp8>(half.matrix, stream, row, group);
      if (half.dtype == KL_E2M1) expand_rows<Fp4>(half.matrix, stream, row, group);
      __syncwarp();
      if (lane() == 0) add_release(flag(p, tile, group * KL_EXPANSION_GROUP), 1);
    }

    struct Fp8 {
      using Codes = uint4;
      static __device__ __forceinline__ Codes load(const KlMat& w, uint64_t, uint32_t row, uint32_t col) {
        return __ldcs(reinterpret_cast<const uint4*>(w.data + row * w.stride + col));
      }
      static __device__ __forceinline__ void store(uint4* to, const Codes& codes) {
        const uint2 a = e4m3_to_bf16(codes.x), b = e4m3_to_bf16(codes.y), c = e4m3_to_bf16(codes.z), d = e4m3_to_bf16(codes.w);
        __stcg(to, make_uint4(a.x, a.y, b.x, b.y)), __stcg(to + 1, make_uint4(c.x, c.y, d.x, d.y));
      }
    };

    struct Fp4 {
      struct Codes {
        uint2 codes;
        uint32_t scale;
      };
      static __device__ __forceinline__ Codes load(const KlMat& w, uint64_t scales, uint32_t row, uint32_t col) {
        // A matrix has fewer than 2^32 elements.
        const uint32_t stride = static_cast<uint32_t>(w.stride), scale = block_scale_offset(row, col / kBlockCols, stride);
        return {__ldcs(reinterpret_cast<const uint2*>(w.data + (row * stride + col) / 2)), reinterpret_cast<const uint8_t*>(scales)[scale]};
      }
      static __device__ __forceinline__ void store(uint4* to, const Codes& codes) {
        const uint32_t scale = block_scale(codes.scale);
        __stcg(to, e2m1_to_bf16(codes.codes.x, scale)), __stcg(to + 1, e2m1_to_bf16(codes.codes.y, scale));
      }
    };

    // Expands a group of k-blocks of the rows from `row` on. Past the end of the weight the last row takes their place. Rows that two units
    // have in common are written twice, with the same values.
    template <class Format>
    __device__ __forceinline__ void expand_rows(uint32_t matrix, uint32_t stream, uint32_t row, uint32_t group) const {
      const KlMat& w = p.stream[stream].w[matrix];
      const uint64_t scales = w.scales;  // read once: in the loop its address would take registers
      const uint32_t col = group * kGroupCols + lane() % kLanesPerRow * kBlockCols;
      if (col >= w.cols) return;
      row += lane() / kLanesPerRow;
      static_assert(KL_EXPANSION_ROWS % (kInFlight * kRowsAtOnce) == 0);
#pragma unroll 1
      for (uint32_t i = 0; i < KL_EXPANSION_ROWS; i += kInFlight * kRowsAtOnce) {
        typename Format::Codes codes[kInFlight];
        const auto nth = [&](uint32_t j) { return min(row + i + j * kRowsAtOnce, w.rows - 1); };
#pragma unroll
        for (uint32_t j = 0; j < kInFlight; j++) codes[j] = Format::load(w, scales, nth(j), col);
#pragma unroll
        for (uint32_t j = 0; j < kInFlight; j++) {
          const uint32_t offset = nth(j) * w.cols + col;
          Format::store(reinterpret_cast<uint4*>(p.expansion.to[stream][matrix] + static_cast<uint64_t>(offset) * sizeof(bf16)), codes[j]);
        }
      }
    }
  };
};

struct MixedInputPolicies : GemmPolicies {
  using Params = KlGemmTma;
  using OperandA = RowsA;
  using OperandB = ExpandedB;
  using Mma = MmaBf16;
  using Scaling = Scaled;
  using Store = StoreBf16OrE4m3Rows;
};
}  // namespace kl::gemm
