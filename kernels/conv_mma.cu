// 3x3 convolution on tensor cores, portable (sm_80 and newer), as a product whose left operand is gathered while it is copied.
//
//   kl_conv_mma_256, _128   out = conv(x) + bias + residual over an image with channels last; same size, doubled by repetition first,
//                           or halved by a stride of two with zeros at the right and bottom edge only; tiles of so many pixels
//   kl_conv_stats           mean and variance of each group of channels, from what the tiles left
//
// A row of the product is a pixel, its inner dimension the nine positions by the input's channels. Bound: tensor cores; decoding
// 1024x1024 is 10.5 TFLOP.
// Needs: bf16, input channels a multiple of 8, 16-byte addresses, sides of at most KL_CONV_SIDE; for statistics whole tiles of
// channels and groups of 2, 4, ... 128 of them.
//
// Statistics are of results as they are stored. Each thread takes mean and squared deviations of the few values it has; these are
// merged by lane, warp and tile, and tiles in f64, so that nothing cancels where the mean is far from zero, always in the same order.
#include "mma.cuh"

extern __shared__ __align__(128) unsigned char dynamic_shared[];

// How many values, their mean and the sum of their squared deviations from it.
template <class T>
struct Moments {
  T count, mean, squares;

  __device__ __forceinline__ void merge(const Moments& other) {
    const T sum = count + other.count, share = sum > 0 ? other.count / sum : 0, delta = other.mean - mean;
    mean += delta * share;
    squares += other.squares + delta * delta * count * share;
    count = sum;
  }

  // With that of the lane whose number differs by `mask`. Both must get the same bits, so the lower one comes first.
  __device__ __forceinline__ void merge_lanes(int mask) {
    Moments other{__shfl_xor_sync(0xffffffffu, count, mask), __shfl_xor_sync(0xffffffffu, mean, mask),
                  __shfl_xor_sync(0xffffffffu, squares, mask)};
    const bool upper = threadIdx.x & mask;
    const Moments low = upper ? other : *this, high = upper ? *this : other;
    *this = low;
    merge(high);
  }
};

// Room for the moments of 2 to 8 columns by a warp's rows, behind the staged tile.
template <class Tile>
__device__ __forceinline__ float4* moments_at(uint32_t warp_row, uint32_t span) {
  static_assert(Tile::kBlockM * Tile::kOutPitch + Tile::kThreads / 64 * (Tile::kBlockN / 2) * 16 <= Tile::kSharedBytes, "no room");
  return reinterpret_cast<float4*>(dynamic_shared + Tile::kBlockM * Tile::kOutPitch) + warp_row * (Tile::kBlockN / 2) + span;
}

// Moments of the thread's results by the groups they belong to, merged as far as a warp has them.
template <class Tile>
__device__ __forceinline__ void warp_moments(const KlConv& p, const Tile& tile, uint32_t row0) {
  const uint32_t width = p.out.cols / p.groups, span = min(width, 8u), lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Tile::kMmaN; n++) {
    Moments<float> own{0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2 * Tile::kMmaM; i++) {
      if (row0 + Tile::row_of_acc(i / 2, i % 2) < p.out.rows) {
        own.count += 2.0f;
        own.mean += tile.acc[i / 2][n][i % 2 * 2] + tile.acc[i / 2][n][i % 2 * 2 + 1];
      }
    }
    if (own.count > 0.0f) own.mean /= own.count;
#pragma unroll
    for (int i = 0; i < 2 * Tile::kMmaM; i++) {
      const float a = tile.acc[i / 2][n][i % 2 * 2] - own.mean, b = tile.acc[i / 2][n][i % 2 * 2 + 1] - own.mean;
      if (row0 + Tile::row_of_acc(i / 2, i % 2) < p.out.rows) own.squares += a * a + b * b;
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) own.merge_lanes(mask);
    if (span > 2) own.merge_lanes(1);
    if (span > 4) own.merge_lanes(2);
    const uint32_t col = Tile::col_of_acc(n);
    if (lane < 4 && col % span == 0) {
      *moments_at<Tile>(threadIdx.x / 64, col / span) = make_float4(own.count, own.mean, own.squares, 0.0f);
    }
  }
}

// Merges what the warps have and leaves it for kl_conv_stats.
template <class Tile>
__device__ __forceinline__ void store_moments(const KlConv& p, uint32_t row0, uint32_t col0) {
  const uint32_t width = p.out.cols / p.groups, spans = width / min(width, 8u);
  if (threadIdx.x >= Tile::kBlockN / width) return;
  Moments<float> group{0.0f, 0.0f, 0.0f};
  for (uint32_t warp = 0; warp < Tile::kThreads / 64; warp++) {
    for (uint32_t span = 0; span < spans; span++) {
      const float4 v = *moments_at<Tile>(warp, threadIdx.x * spans + span);
      group.merge({v.x, v.y, v.z});
    }
  }
  float4* to = reinterpret_cast<float4*>(p.partials) + static_cast<uint64_t>(row0 / Tile::kBlockM) * p.groups + col0 / width;
  to[threadIdx.x] = make_float4(group.count, group.mean, group.squares, 0.0f);
}

// Pairs of results, the residual read as one word; every column exists.
template <class Tile>
__device__ __forceinline__ void store_whole_tile(const KlConv& p, Tile& tile, uint32_t row0, uint32_t col0) {
#pragma unroll
  for (int m = 0; m < Tile::kMmaM; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t row = Tile::row_of_acc(m, half);
      const bool residual = p.residual.data && row0 + row < p.out.rows;
      const bf16* old = residual ? row_of<const bf16>(p.residual, row0 + row) + col0 : nullptr;
#pragma unroll
      for (int n = 0; n < Tile::kMmaN; n++) {
        const uint32_t col = Tile::col_of_acc(n);
        const float* bias = row_of<const float>(p.bias, 0) + col0 + col;
        float2 v = make_float2(tile.acc[m][n][2 * half] + bias[0], tile.acc[m][n][2 * half + 1] + bias[1]);
        if (residual) {
          const float2 r = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(old + col));
          v.x += r.x, v.y += r.y;
        }
        Tile::stage_pair(dynamic_shared, row, col, v.x, v.y);
        tile.acc[m][n][2 * half] = to_float(from_float<bf16>(v.x));
        tile.acc[m][n][2 * half + 1] = to_float(from_float<bf16>(v.y));
      }
    }
  }
  if (p.stats.data) warp_moments(p, tile, row0);
  Tile::store_staged(dynamic_shared, p.out, row0, col0, Tile::kBlockN);
  if (p.stats.data) store_moments<Tile>(p, row0, col0);
}

// Value by value, for other types and for the last columns.
template <class Tile>
__device__ __forceinline__ void store_edge_tile(const KlConv& p, Tile& tile, uint32_t row0, uint32_t col0) {
#pragma unroll
  for (int m = 0; m < Tile::kMmaM; m++) {
#pragma unroll
    for (int n = 0; n < Tile::kMmaN; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const uint32_t row = row0 + Tile::row_of_acc(m, e / 2), col = col0 + Tile::col_of_acc(n) + e % 2;
        if (row >= p.out.rows || col >= p.out.cols) continue;
        float v = tile.acc[m][n][e] + load<float>(p.bias, 0, col);
        if (p.residual.data) v += load_any(p.residual, row, col);
        store_any(p.out, row, col, v);
      }
    }
  }
}

__device__ __forceinline__ uint32_t in_image(int32_t at, uint32_t size) { return at >= 0 && at < static_cast<int32_t>(size); }

template <class Tile>
__device__ __forceinline__ void conv(const KlConv& p) {
  // Columns first: the filters stay in the cache, and so do the pixels that neighbours share.
  const uint32_t col_tiles = ceil_div(p.out.cols, static_cast<uint32_t>(Tile::kBlockN));
  const uint32_t row0 = blockIdx.x / col_tiles * Tile::kBlockM, col0 = blockIdx.x % col_tiles * Tile::kBlockN;
  const uint32_t channels = p.x.cols, stride = p.x.stride, out_width = conv_width(p), chunk = Tile::copy_chunk() * 8;
  // Of each of the thread's pixels: the element under the middle of the filter (its corner if halved), and a byte that says which
  // rows (bits 0 to 2) and columns (3 to 5) of the filter lie in the image, and whether y (6) and x (7) are odd. Pixels beyond the
  // last have none.
  uint32_t center[Tile::kACopies], taps_inside[ceil_div(Tile::kACopies, 4)] = {};
#pragma unroll
  for (int i = 0; i < Tile::kACopies; i++) {
    const uint32_t pixel = row0 + Tile::copy_row() + Tile::kRowsPerCopy * i, y = pixel / out_width, x = pixel % out_width;
    uint32_t bits = y % 2 << 6 | x % 2 << 7;
#pragma unroll
    for (uint32_t tap = 0; tap < 3; tap++) {
      bits |= in_image(conv_source(p.sampling, y, tap, p.height), p.height) << tap;
      bits |= in_image(conv_source(p.sampling, x, tap, p.width), p.width) << (3 + tap);
    }
    const uint32_t at_y = p.sampling == KL_DOWN ? 2 * y : p.sampling == KL_UP ? y / 2 : y;
    const uint32_t at_x = p.sampling == KL_DOWN ? 2 * x : p.sampling == KL_UP ? x / 2 : x;
    center[i] = (at_y * p.width + at_x) * stride;
    if (pixel < p.out.rows) taps_inside[i / 4] |= bits << i % 4 * 8;
  }
  const bf16 *image = row_of<const bf16>(p.x, 0), *filters = row_of<const bf16>(p.w, 0);
  const uint32_t filter = (col0 + Tile::copy_row()) * static_cast<uint32_t>(p.w.stride) + chunk;
  const uint32_t last_filter = (p.out.cols - 1) * static_cast<uint32_t>(p.w.stride) + chunk;
  Tile tile;
  tile.mainloop(
      dynamic_shared, 9 * channels, 0, ceil_div(9 * channels, static_cast<uint32_t>(Tile::kBlockK)),
      [&](int i, uint32_t k, bool& valid) {
        const uint32_t tap = (k + chunk) / channels, channel = k + chunk - tap * channels, bits = taps_inside[i / 4] >> i % 4 * 8;
        uint32_t dy = tap / 3, dx = tap % 3;
        valid = valid && bits >> dy & bits >> (3 + dx) & 1;
        if (p.sampling == KL_UP) dy = (dy + (bits >> 6 & 1) + 1) / 2, dx = (dx + (bits >> 7 & 1) + 1) / 2;
        // From the middle, which is one row and one column in. Offsets wrap around and end in the image.
        const uint32_t in = p.sampling == KL_DOWN ? 0 : p.width + 1;
        return image + (valid ? center[i] + (dy * p.width + dx - in) * stride + channel : 0);
      },
      // Filters beyond the last repeat it: what becomes of them is not stored.
      [&](int i, uint32_t k, bool&) {
        return filters + (min(filter + i * Tile::kRowsPerCopy * static_cast<uint32_t>(p.w.stride), last_filter) + k);
      });
  const bool words = p.residual.dtype == KL_BF16 && p.residual.data % 4 == 0 && p.residual.stride % 2 == 0;
  const bool pairs = p.out.dtype == KL_BF16 && (!p.residual.data || words);
  if (pairs && col0 + Tile::kBlockN <= p.out.cols) {
    store_whole_tile(p, tile, row0, col0);
  } else {
    store_edge_tile(p, tile, row0, col0);
  }
}

using Tile256 = MmaTile<256, 8, 64, 3>;
using Tile128 = MmaTile<128, 4, 32, 3>;
static_assert(Tile256::kSharedBytes == KL_MMA_SHARED_256 && Tile256::kThreads == KL_MMA_THREADS_256, "abi.h states another size");
static_assert(Tile128::kSharedBytes == KL_MMA_SHARED_128 && Tile128::kThreads == KL_MMA_THREADS, "abi.h states another size");

KL_ENTRY(kl_conv_mma_256, KlConv, KL_MMA_THREADS_256, 1) { conv<Tile256>(p); }
KL_ENTRY(kl_conv_mma_128, KlConv, KL_MMA_THREADS, 2) { conv<Tile128>(p); }

// One block a group: threads merge every KL_NORM_THREADS-th tile, then each other.
KL_ENTRY(kl_conv_stats, KlConv, KL_NORM_THREADS) {
  __shared__ Moments<double> warps[KL_NORM_THREADS / 32];
  const float4* partials = reinterpret_cast<const float4*>(p.partials) + blockIdx.x;
  Moments<double> group{0.0, 0.0, 0.0};
  for (uint32_t tile = threadIdx.x; tile < p.row_tiles; tile += KL_NORM_THREADS) {
    const float4 v = partials[static_cast<uint64_t>(tile) * p.groups];
    group.merge({v.x, v.y, v.z});
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) group.merge_lanes(mask);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = group;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint32_t warp = 1; warp < KL_NORM_THREADS / 32; warp++) group.merge(warps[warp]);
    float* stats = row_of<float>(p.stats, blockIdx.x);
    stats[0] = static_cast<float>(group.mean);
    stats[1] = static_cast<float>(group.squares / group.count);
  }
}
