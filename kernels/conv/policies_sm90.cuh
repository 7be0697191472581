// The policies of a 3x3 convolution as an implicit GEMM on the persistent main loop: pixels for rows of A, filters for rows of B.
//
// A tile is a box of pixels: KL_CONV_TILE_WIDTH columns by as many lines as make its rows. A k-block is up to 64 channels of one filter
// tap: the image box, shifted by the tap. The boxes of all taps are one window with two more columns and lines, which is loaded once. To
// wgmma a line of the tile is a group of rows, and groups may begin at any row and have any distance. So im2col (Chetlur et al. 2014,
// "cuDNN: Efficient Primitives for Deep Learning") is a matter of descriptors. TMA fills what lies outside of the image with zeros, which
// is the padding. Loads from L2 for 64 channels are 167 KB instead of 288 for a tile of 128x256, and 115 instead of 360 for one of 256x128.
#pragma once

#include <common/moments.cuh>
#include <gemm/tma_epilogue.cuh>
#include <gemm/tma_policies.cuh>

namespace kl::conv {
using namespace gemm;

// The most channel groups that a tile has.
constexpr uint32_t kMostGroups = KL_CONV_TILE_GROUPS;

// KlConvSm90 as a struct that inherits the GEMM's fields.
struct ConvParams : KlGemmTma {
  KlConvImage image;
};
static_assert(sizeof(ConvParams) == sizeof(KlConvSm90) && sizeof(ConvParams) % 128 == 0, "the layout is that of abi.h, without a gap");

// The first pixel of a warpgroup or of a warp.
template <class Config>
struct PixelOrigin {
  static constexpr uint32_t kWidth = KL_CONV_TILE_WIDTH, kTileLines = Config::kBlockM / kWidth;
  int32_t column, line;

  // Begins at row `first` of a tile.
  __device__ __forceinline__ PixelOrigin(const ConvParams& p, const TileCoord<Config>& at, uint32_t first) {
    const uint32_t down = at.row_tile / p.image.tiles_across;
    column = (at.row_tile - down * p.image.tiles_across) * kWidth, line = down * kTileLines + first / kWidth;
  }

  __device__ __forceinline__ void load(uint32_t to, const KlTensorMap* map, uint32_t col, uint32_t full) const {
    tma_load_3d(to, map, col, column, line, full);
  }
  __device__ __forceinline__ void store(const KlTensorMap* map, uint32_t from, uint32_t col, uint32_t skipped) const {
    tma_store_3d(map, from, col, column, line + skipped / kWidth);
  }
};

// A position in the k-blocks of a tile. It moves by steps, because a division for every k-block takes as long as a few MMAs, and the
// producer is one thread.
struct TapCursor {
  const KlConvImage& image;
  uint32_t k, block, tap;

  __device__ __forceinline__ TapCursor(const ConvParams& p, uint32_t k)
      : image(p.image), k(k), block(k / p.image.taps), tap(k - k / p.image.taps * p.image.taps) {}
  __device__ __forceinline__ operator uint32_t() const { return k; }

  // Whether the k-block belongs to a tap. Otherwise it belongs to the shortcut.
  __device__ __forceinline__ bool is_tap() const { return k < image.tap_blocks; }
  __device__ __forceinline__ bool begins_window() const { return !is_tap() || image.window_starts >> tap & 1; }
  // The first channel of a shortcut k-block.
  template <class Config>
  __device__ __forceinline__ uint32_t shortcut_channel() const {
    return (k - image.tap_blocks) * Config::kBlockK;
  }

  __device__ __forceinline__ void advance() {
    k++;
    if (++tap == image.taps) tap = 0, block++;
  }
};

// A is windows of an image.
struct WindowsA {
  using Cursor = TapCursor;
  static constexpr int kWindows = 2;
  static constexpr uint32_t kWidth = KL_CONV_WINDOW_WIDTH, kLineBytes = kWidth * kSwizzleRowBytes;
  // The window row where the tile's own pixels begin.
  static constexpr uint32_t kCenter = kWidth + 1;
  static constexpr uint32_t window_bytes(uint32_t rows) { return (rows / KL_CONV_TILE_WIDTH + 2) * kLineBytes; }
  static constexpr uint32_t scale_bytes(uint32_t) { return 0; }
  static __device__ __forceinline__ const KlTensorMap* first_map(const ConvParams& p) { return &p.image.plane[0]; }
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address) { return wgmma_descriptor(address, kLineBytes); }
  static constexpr uint32_t kTileBytes = kWgmmaRows / KL_CONV_TILE_WIDTH * kLineBytes;

  template <class Config>
  struct Loader {
    static_assert(Config::kMode != ClusterMode::kMulticastA, "every CTA has pixels of its own");
    static constexpr uint32_t kTmaBytes = 0, kWindowTmaBytes = window_bytes(Config::kBlockM);
    PixelOrigin<Config> tile;

    __device__ __forceinline__ Loader(const ConvParams& p, const TileCoord<Config>& at, uint32_t) : tile(p, at, 0) {}

    // Loads the window that the k-block at `at` reads.
    __device__ __forceinline__ void load(const TapCursor& at, uint32_t to, uint32_t full) const {
      const KlConvImage& image = at.image;
      if (!at.is_tap()) {
        return tma_load_3d(to, &image.shortcut, at.shortcut_channel<Config>(), tile.column - 1, tile.line - 1, full);
      }
      const KlTensorMap* plane = &image.plane[image.tap_planes >> 2 * at.tap & 3];
      tma_load_3d(to, plane, at.block * Config::kBlockK, tile.column + image.origin, tile.line + image.origin, full);
    }
  };

  // The consumers' position in the k-blocks.
  template <class Config>
  struct Reader : TapCursor {
    uint32_t phase_row;

    __device__ __forceinline__ Reader(const ConvParams& p, const TileCoord<Config>& at, uint32_t k)
        : TapCursor(p, k), phase_row(at.part / 2 * kWidth + at.part % 2) {}

    // The offset of the k-block's rows in the window.
    __device__ __forceinline__ uint32_t offset() const {
      const uint32_t row = static_cast<uint32_t>(image.tap_rows >> 6 * tap) & 63;
      return (is_tap() ? row + phase_row : kCenter) * kSwizzleRowBytes;
    }

    // Whether only the first half of a k-block is multiplied, because the rest is zeros. The 96-column tile is for images with 96 channels:
    // the last channel block of a tap is half empty.
    __device__ __forceinline__ bool is_half() const { return Config::kBlockN == 96 && k < image.half_blocks && block % 2 == 1; }
  };
};

// B is filters: rows of output channels, whose columns are taps by input channels. The CTAs of a cluster load one half each and multicast
// it. Columns past the end of a partial channel block are multiplied by zeros of A.
struct FiltersB : CopiedB {
  template <class Config>
  struct Loader : CopiedB::Loader<Config> {
    const KlTensorMap* shortcut;

    __device__ __forceinline__ Loader(const ConvParams& p, const TileCoord<Config>& at, uint32_t rank)
        : CopiedB::Loader<Config>(p, at, rank), shortcut(&p.w[0][1]) {}

    __device__ __forceinline__ void load(const TapCursor& at, uint32_t to, uint32_t full) const {
      const uint32_t place = static_cast<uint32_t>(at.image.tap_filters >> 4 * at.tap) & 15;
      const uint32_t col = at.is_tap() ? place * at.image.channels + at.block * Config::kBlockK : at.shortcut_channel<Config>();
      const KlTensorMap* map = at.is_tap() ? this->first.map : shortcut;
      static_assert(CopiedB::Loader<Config>::kMulticast, "a cluster has the same filters");
      tma_load_2d_multicast(to + this->rank * (Config::kBBytes / 2), map, col, this->first.row, full, kAllCtas);
    }
  };
};

// The output is an image. The sixteen rows of a warp are pieces of two lines.
struct StoreBf16Pixels : StoreBf16Rows {
  template <class Config>
  using Origin = PixelOrigin<Config>;
};

// Bias, residual, and the moments of groups of channels for the group norm that follows.
//
// Moments are computed from rounded values. A thread sums the differences of its values from a pivot, the first pixel's value in the warp,
// and their squares: two columns at a time, since no group divides them. Nothing cancels, and nothing is divided. Lanes of different pixels
// then add up their sums by recursive halving (Rabenseifner 2004), after which each lane has one pair of columns out of 64. Pairs of one
// group merge their moments, then the warps of a warpgroup do.
template <class Config>
struct ConvEpilogue : GemmEpilogue<Config> {
  using Base = GemmEpilogue<Config>;
  using Base::acc, Base::lane, Base::origin, Base::p, Base::part, Base::thread;
  static constexpr int kMmaM = Config::kMmaM, kBlockN = Config::kBlockN;
  // Columns whose sums are halved together: one pair for each lane of a warp.
  static constexpr int kSpan = 64, kSpans = kBlockN / kSpan, kSpanFragments = kSpan / 8;
  static constexpr bool kHasMoments = Config::kHasMoments;
  const TileCoord<Config>& at;
  uint32_t moments;  // the address of the warpgroup's moments in shared memory

  __device__ __forceinline__ ConvEpilogue(const ConvParams& p, const TileCoord<Config>& at, typename Config::Acc& acc,
                                          const Pipeline<Config>& pipe, uint32_t thread)
      : Base(p, at, acc, pipe, thread), at(at), moments(pipe.exchange(thread / kWarpgroupThreads - 1)) {}

  __device__ __forceinline__ uint32_t group() const { return thread / kWarpgroupThreads - 1; }
  __device__ __forceinline__ uint32_t warp() const { return thread / 32 % kWarpgroupWarps; }

  // Image lines that a warp and the tile have in a wgmma tile.
  static constexpr int kWarpLines = kWarpRows / KL_CONV_TILE_WIDTH, kTileLines = kWgmmaRows / KL_CONV_TILE_WIDTH;

  // Whether line i of wgmma tile m of warp `of_warp` of this warpgroup is inside the image.
  __device__ __forceinline__ bool has_line(int m, int i, int of_warp) const {
    return origin.line + m * kTileLines + i + (of_warp - static_cast<int>(warp())) * kWarpLines < static_cast<int>(p.image.height);
  }

  // Lines of a warp of this warpgroup, and columns of the tile, that are inside the image.
  __device__ __forceinline__ uint32_t lines(int of_warp) const {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kMmaM * kWarpLines; i++) count += has_line(i / kWarpLines, i % kWarpLines, of_warp);
    return count;
  }
  __device__ __forceinline__ uint32_t columns() const {
    return min(KL_CONV_TILE_WIDTH, p.image.width - static_cast<uint32_t>(origin.column));
  }

  __device__ __forceinline__ void add_shortcut_bias() {
    if (!p.image.shortcut_bias.data) return;
    const float* bias = row_of<const float>(p.image.shortcut_bias, 0);
    this->for_each_column([&](int n, uint32_t col) {
      const float a = bias[col], b = bias[col + 1];
#pragma unroll
      for (int m = 0; m < kMmaM; m++) {
        float* v = &acc[m][4 * n];
        v[0] += a, v[1] += b, v[2] += a, v[3] += b;
      }
    });
  }

  __device__ __forceinline__ void round() {
#pragma unroll
    for (int m = 0; m < kMmaM; m++) {
#pragma unroll
      for (int e = 0; e < kBlockN / 2; e += 2) {
        const float2 pair = unpack_pair(pack_bf16(acc[m][e], acc[m][e + 1]));
        acc[m][e] = pair.x, acc[m][e + 1] = pair.y;
      }
    }
  }

  // The value of fragment n of the warp's first pixel, in the first column of the lane's pair. Lanes exchange it in bf16, which holds it
  // exactly. If they exchanged accumulators, ptxas would wait after every wgmma (C7520).
  __device__ __forceinline__ float pivot(int n) const {
    return unpack_pair(__shfl_sync(0xffffffffu, pack_bf16(acc[0][4 * n], acc[0][4 * n + 1]), lane() % 4)).x;
  }

  // Mean and M2 of the lane's pair of a span's columns, over the `values` values of all of the warp's pixels. At an edge of the image some
  // of the pixels are not there.
  template <bool kEdge>
  __device__ __forceinline__ float2 pair_moments(int span, float values) const {
    float sum[2][kSpanFragments];  // of differences, of squares
#pragma unroll
    for (int i = 0; i < kSpanFragments; i++) {
      const int n = span * kSpanFragments + i;
      const float from = pivot(n);
      sum[0][i] = 0.0f, sum[1][i] = 0.0f;
#pragma unroll
      for (int m = 0; m < kMmaM; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (kEdge && (!has_line(m, half, warp()) || lane() / 4 >= columns())) continue;
          const float a = acc[m][4 * n + 2 * half] - from, b = acc[m][4 * n + 2 * half + 1] - from;
          sum[0][i] += a + b;
          sum[1][i] += a * a + b * b;
        }
      }
    }
    // The lane keeps the fragments that the upper bits of its index select.
    int count = kSpanFragments;
#pragma unroll
    for (int mask = 16; mask >= 4; mask /= 2) {
      count /= 2;
      const bool upper = lane() & mask;
#pragma unroll
      for (int q = 0; q < 2; q++) {
#pragma unroll
        for (int i = 0; i < kSpanFragments / 2; i++) {
          if (i >= count) break;
          const float kept = upper ? sum[q][count + i] : sum[q][i], sent = upper ? sum[q][i] : sum[q][count + i];
          sum[q][i] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
        }
      }
    }
    const float inverse = values > 0.0f ? 1.0f / values : 0.0f;
    // Each lane takes the pivot of its own fragment.
    float from = 0.0f;
#pragma unroll
    for (int i = 0; i < kSpanFragments; i++) {
      const float each = pivot(span * kSpanFragments + i);
      if (lane() / 4 == i) from = each;
    }
    return make_float2(from + sum[0][0] * inverse, fmaxf(sum[1][0] - sum[0][0] * sum[0][0] * inverse, 0.0f));
  }

  // The address where a warp leaves the moments of group i for the warp `half` before it. The three pairs of warps that do so use different
  // addresses, so the barrier of each step also keeps the next tile from overwriting what is still to be read.
  __device__ __forceinline__ uint32_t slot(uint32_t half, uint32_t i) const {
    return moments + ((kWarpgroupWarps - 2 * half + warp() % half) * kMostGroups + i) * sizeof(float2);
  }

  __device__ __forceinline__ void store_moments() {
    const uint32_t width = part.out.cols / p.image.groups;  // columns of a group, a power of two
    const uint32_t lanes = width / 2, groups_in_span = kSpan / width;
    float2 own[kSpans];  // mean and M2
    float count = static_cast<float>(2 * columns() * lines(warp()));
    if (columns() == KL_CONV_TILE_WIDTH && lines(warp()) == kMmaM * kWarpLines) {
#pragma unroll
      for (int i = 0; i < kSpans; i++) own[i] = pair_moments<false>(i, count);
    } else {
#pragma unroll
      for (int i = 0; i < kSpans; i++) own[i] = pair_moments<true>(i, count);
    }
    // Both lanes have the same number of values, so nothing needs to be divided.
    for (uint32_t mask = 1; mask < lanes; mask *= 2, count *= 2.0f) {
#pragma unroll
      for (int i = 0; i < kSpans; i++) {
        const float mean = __shfl_xor_sync(0xffffffffu, own[i].x, mask), squares = __shfl_xor_sync(0xffffffffu, own[i].y, mask);
        const float delta = own[i].x - mean;
        own[i] = make_float2(0.5f * (own[i].x + mean), own[i].y + squares + delta * delta * (0.5f * count));
      }
    }
    // First the two warps of the upper half, then the second of the remaining two, pass their moments to the lower half.
    const bool owner = lane() % lanes == 0;
#pragma unroll
    for (uint32_t half = kWarpgroupWarps / 2; half > 0; half /= 2) {
      if (owner && warp() >= half && warp() < 2 * half) {
#pragma unroll
        for (int i = 0; i < kSpans; i++) {
          const uint2 both = make_uint2(__float_as_uint(own[i].x), __float_as_uint(own[i].y));
          store_shared(slot(half, i * groups_in_span + lane() / lanes), both);
        }
      }
      warpgroup_sync(kWarpgroupBarrier + group());
      if (owner && warp() < half) {
        // Moments that the other warp has merged before count as well.
        uint32_t lines_there = 0;
        for (uint32_t other = warp() + half; other < kWarpgroupWarps; other += 2 * half) lines_there += lines(other);
        const float others = static_cast<float>(columns() * lines_there * width);
        const float sum = count + others, share = sum > 0.0f ? others / sum : 0.0f;
#pragma unroll
        for (int i = 0; i < kSpans; i++) {
          const uint2 both = load_shared_pair(slot(half, i * groups_in_span + lane() / lanes));
          const float delta = __uint_as_float(both.x) - own[i].x;
          own[i] = make_float2(own[i].x + delta * share, own[i].y + __uint_as_float(both.y) + delta * delta * (count * share));
        }
        count = sum;
      }
    }
    const uint32_t row_tiles = p.stream[0].row_tiles * Config::kClusterM, tile = at.part * row_tiles + at.row_tile;
    StoredMoments* to = reinterpret_cast<StoredMoments*>(p.image.partials) + (tile * Config::kConsumers + group()) * p.image.groups;
#pragma unroll
    for (int i = 0; i < kSpans; i++) {
      const uint32_t index = (this->col0 + i * kSpan) / width + lane() / lanes;
      if (owner && warp() == 0 && index < p.image.groups) to[index] = StoredMoments{own[i].x, own[i].y, count};
    }
  }

  __device__ __forceinline__ void run(Pipeline<Config>& pipe) {
    if (lane() == 0) tma_store_wait<0>();  // the stores of the previous tile have read the staging buffers
    this->add_bias();
    add_shortcut_bias();
    if (part.epilogue == KL_GATE_RESIDUAL) this->add_residual(pipe);
    if constexpr (kHasMoments) {
      if (p.image.partials) {
        round();
        store_moments();
      }
    }
    this->store_linear(1.0f);
  }
};

// `kHasMoments` says whether the kernel can compute moments. Tiles cannot if their column count is no power of two, like the group sizes of
// the images they are for.
template <bool kHasMoments_>
struct ConvPolicies {
  using Params = ConvParams;
  using OperandA = WindowsA;
  using OperandB = FiltersB;
  using Mma = MmaBf16;
  using Scaling = NoScaling;
  using Store = StoreBf16Pixels;
  template <class Config>
  using Epilogue = ConvEpilogue<Config>;
  static constexpr bool kHasMoments = kHasMoments_;
  static constexpr uint32_t kExchangeBytes = kHasMoments ? (kWarpgroupWarps - 1) * kMostGroups * sizeof(float2) : 0;
};
}  // namespace kl::conv
