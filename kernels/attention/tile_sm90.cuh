// The registers that Hopper's attention kernels keep of a tile from one KV block to the next, and its Stream-K partials.
#pragma once

#include <attention/softmax.cuh>
#include <persistent/scheduler.cuh>

namespace kl::attention {
using namespace persistent;

// A row maximum stays until a score exceeds it by this many powers of two. Probabilities up to 2^8 are as precise as those up to one, and
// `out` is hardly ever rescaled (FlashAttention-4).
constexpr float kMaxSlack = 8.0f;

// A thread's registers of the output, a warpgroup's rows by kCols columns: two rows that are eight apart, and two of every eight columns.
template <int kCols>
struct OutputTile {
  float out[kCols / 2] = {}, row_sum[2] = {}, row_max[2] = {-INFINITY, -INFINITY};
  float correction[2];  // factors that rescale `out` after the row maximum rose
  bool raised;          // whether the maximum of any row of the warp rose

  // Online softmax of a block with a running maximum: scores become unnormalized probabilities and are added to the row sums. The thread
  // has kCount scores of each row: score_of(h) gives the scores of row h. block_max[h] is the largest of them and row_max[h]. Two partial
  // sums keep the additions from being one dependency chain.
  template <int kCount, class ScoreOf>
  __device__ __forceinline__ void online_softmax_block(const float (&block_max)[2], float scale, ScoreOf score_of) {
    const auto rises = [&](int h) { return (block_max[h] - row_max[h]) * scale > kMaxSlack; };
    raised = __ballot_sync(0xffffffffu, rises(0) || rises(1)) != 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float new_max = raised ? block_max[h] : row_max[h];
      correction[h] = online_softmax<kCount, 2>(row_max[h], row_sum[h], new_max, Exp2{scale}, score_of(h));
    }
  }

  __device__ __forceinline__ void rescale_out(const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < kCols / 2; i++) out[i] *= by[i / 2 % 2];
  }
};

// The Stream-K partials of a warp: row sums and maxima, then the accumulators of a lane.
template <int kCols, int kCluster, int kWarps, bool kRunningMax>
struct TilePartials : PartialTile<PartialsOfWarp, kCols / 8 + 1> {
  using Base = PartialTile<PartialsOfWarp, kCols / 8 + 1>;

  __device__ __forceinline__ TilePartials(const KlTileSchedule& schedule, uint32_t worker)
      : Base(schedule, partials_of_warp<kCluster, kWarps>(worker)) {}

  __device__ __forceinline__ void store_tile(const OutputTile<kCols>& tile) const {
    Base::store([&](int i) {
      if (i == 0) return make_float4(tile.row_sum[0], tile.row_sum[1], tile.row_max[0], tile.row_max[1]);
      const float* v = &tile.out[4 * (i - 1)];
      return make_float4(v[0], v[1], v[2], v[3]);
    });
  }

  __device__ __forceinline__ void add_to(OutputTile<kCols>& tile, float scale) const {
    Base::wait();
    const float4 peer_stats = Base::load(0);
    float by[2] = {1.0f, 1.0f};
    if constexpr (kRunningMax) {
      const float their_max[2] = {peer_stats.z, peer_stats.w};
      float correction[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float new_max = fmaxf(tile.row_max[h], their_max[h]);
        correction[h] = Exp2{scale}.correction(tile.row_max[h], new_max), by[h] = Exp2{scale}.correction(their_max[h], new_max);
        tile.row_sum[h] *= correction[h], tile.row_max[h] = new_max;
      }
      tile.rescale_out(correction);
    }
    tile.row_sum[0] += peer_stats.x * by[0], tile.row_sum[1] += peer_stats.y * by[1];
    Base::template load_each</*first*/ 1, /*in flight*/ 1>([&](int i, const float4& v) {
      float* to = &tile.out[4 * (i - 1)];
      to[0] += v.x * by[0], to[1] += v.y * by[0], to[2] += v.z * by[1], to[3] += v.w * by[1];
    });
  }
};
}  // namespace kl::attention
