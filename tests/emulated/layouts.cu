// Kernels that store the results of the kernels' layout functions: swizzles, scale tiles, exchanges among the lanes of a quad, and the
// loads and stores of a warp in the NVFP4 GEMM. layouts.rs compares them with tables and checks that they are bijections.
#include <common/nvfp4.cuh>
#include <common/reduce.cuh>
#include <common/swizzle.cuh>
#include <gemm/tma_epilogue.cuh>
#include <gemm/policies_sm120.cuh>

using namespace kl::gemm;

struct LayoutParams {
  uint64_t swizzled_32, swizzled_64, swizzled_128;  // [16 rows][chunks]
  uint64_t scale_offsets;                           // [256 rows][8 blocks]
  uint64_t halves, words;                           // [lane][4]
};

template <uint32_t kRowBytes>
void store_swizzled(uint64_t out, uint32_t lane) {
  constexpr uint32_t kChunks = kRowBytes / 16;
  for (uint32_t i = lane; i < 16 * kChunks; i += 32) reinterpret_cast<uint32_t*>(out)[i] = swizzled<kRowBytes>(i / kChunks, i % kChunks);
}

KL_ENTRY(layouts, LayoutParams, 32) {
  store_swizzled<32>(p.swizzled_32, lane());
  store_swizzled<64>(p.swizzled_64, lane());
  store_swizzled<128>(p.swizzled_128, lane());
  constexpr uint32_t kRows = 2 * KL_SCALE_TILE_ROWS, kBlocks = 2 * KL_SCALE_TILE_COLS / 16;
  for (uint32_t i = lane(); i < kRows * kBlocks; i += 32) {
    reinterpret_cast<uint32_t*>(p.scale_offsets)[i] = block_scale_offset(i / kBlocks, i % kBlocks, 2 * KL_SCALE_TILE_COLS);
  }
  // Item i of a lane is 4 * lane + i.
  const auto item = [](uint32_t i) { return 4 * lane() + i; };
  const uint2 halves = transpose_quad_halves(item(0) | item(1) << 16, item(2) | item(3) << 16);
  const uint32_t four[4] = {item(0), item(1), item(2), item(3)};
  const uint4 words = transpose_quad(four);
  reinterpret_cast<uint4*>(p.halves)[lane()] = make_uint4(halves.x & 0xffff, halves.x >> 16, halves.y & 0xffff, halves.y >> 16);
  reinterpret_cast<uint4*>(p.words)[lane()] = words;
}

// ----------------------------------------------------------------------------------------------------------- NVFP4 GEMM

using Config = GemmConfig<Sm120Policies<WarpMmaNvfp4, BlockScaledA, BlockScaledB>, 256, 128, 128, 2, 3, ClusterMode::kSingle>;

struct TileParams : KlGemmTma {
  uint64_t offsets;  // [warp][lane][3]: scales of A, and of both halves of B, from where A's and B's scales begin in a stage
  uint32_t bit;
};

// Stores where the consumers' lanes load scales in the first tile.
KL_ENTRY(scales_of_lanes, TileParams, Config::kThreads) {
  if (threadIdx.x < kWarpgroupThreads) return;
  const uint32_t warp = threadIdx.x / 32 - kWarpgroupWarps;
  const uint32_t row = warp / kWarpgroupWarps * (Config::kMmaM * kWgmmaRows) + warp % kWarpgroupWarps * kWarpRows;
  const WarpMmaNvfp4::Scales<Config> scales(p, TileCoord<Config>(p, 0), row);
  uint32_t* to = reinterpret_cast<uint32_t*>(p.offsets) + (warp * 32 + lane()) * 3;
  to[0] = scales.a_offset - Config::kABytes - Config::kBBytes;
  for (int half = 0; half < 2; half++) to[1 + half] = scales.b_offset[half] - Config::kABytes - Config::kBBytes - Config::kAScaleBytes;
}

// Stores results whose signs are a bit of their index in the output. Scales of blocks are one or two, by a bit of the block's index. An
// accumulator has the row and column of the MMA's fragments.
KL_ENTRY(store_signs, TileParams, Config::kThreads) {
  if (threadIdx.x < kWarpgroupThreads) return;
  typename Config::Acc acc;
  const Pipeline<Config> pipe{{0}, {}};
  GemmEpilogue<Config> epilogue(p, TileCoord<Config>(p, 0), acc, pipe, threadIdx.x);
  constexpr uint32_t kCols = KL_SCALE_TILE_COLS;
  epilogue.template store_e2m1<kCols>([&](int m, int e) {
    const uint32_t row = epilogue.row0 + kWgmmaRows * m + lane() / 4 + e / 2 % 2 * 8, col = e / 4 * 8 + lane() % 4 * 2 + e % 2;
    const uint32_t element = row * kCols + col, block = element / 16;
    const float magnitude = block >> p.bit & 1 ? 12.0f : 6.0f;
    return element >> p.bit & 1 ? -magnitude : magnitude;
  });
}
