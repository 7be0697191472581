// Group norm of NHWC images.
//
//   kl_group_stats_*, kl_group_stats_finish    mean and variance of each group of channels over all pixels
//   kl_group_norm_*  y = (x - mean) / sqrt(var + eps) * weight + bias, then SiLU if requested; finishes the statistics itself if nothing
//                    else needs them.  _8: bf16 images in aligned runs of eight channels; _any: all others
//
// Bound: HBM. An image whose statistics are computed here is read twice, the second time from its end, which L2 still holds. Group sums
// are relative to one value of the group, which keeps them accurate where the mean is far from zero. All sums are added in a fixed
// order.
#include <common/math.cuh>
#include <common/reduce.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <ptx/entry.cuh>

// The unit of access: a run of eight aligned bf16 channels, or a single channel of any dtype.
struct EightChannels {
  static constexpr int kWidth = kVector;
  uint4 raw;

  __device__ __forceinline__ void load(const KlMat& m, uint64_t row, uint32_t channel) {
    raw = *reinterpret_cast<const uint4*>(row_of<const bf16>(m, row) + channel);
  }
  __device__ __forceinline__ void get(float (&v)[kWidth]) const { unpack_bf16(raw, v); }
  static __device__ __forceinline__ void load_weights(const KlMat& m, uint32_t channel, float (&v)[kWidth]) {
    load_vector(row_of<const float>(m, 0) + channel, v);
  }
  static __device__ __forceinline__ void store(const KlMat& m, uint64_t row, uint32_t channel, const float (&v)[kWidth]) {
    store_vector(row_of<bf16>(m, row) + channel, v);
  }
};

struct OneChannel {
  static constexpr int kWidth = 1;
  float value;

  __device__ __forceinline__ void load(const KlMat& m, uint64_t row, uint32_t channel) { value = load_any(m, row, channel); }
  __device__ __forceinline__ void get(float (&v)[kWidth]) const { v[0] = value; }
  static __device__ __forceinline__ void load_weights(const KlMat& m, uint32_t channel, float (&v)[kWidth]) {
    v[0] = ::load<float>(m, 0, channel);
  }
  static __device__ __forceinline__ void store(const KlMat& m, uint64_t row, uint32_t channel, const float (&v)[kWidth]) {
    store_any(m, row, channel, v[0]);
  }
};

// How a CTA of KL_GROUP_THREADS threads walks over pixels. Each thread keeps to the same run of channels, so that per-channel values stay
// in registers. Threads past the last whole pixel are idle. Images with more channel runs than a CTA has threads are walked over several
// times.
struct PixelWalk {
  uint32_t runs, pixels, thread_pixel, thread_run;

  __device__ explicit PixelWalk(uint32_t all_runs) : runs(all_runs) {
    pixels = max(1u, KL_GROUP_THREADS / runs);
    thread_pixel = runs <= KL_GROUP_THREADS ? threadIdx.x / runs : 0;
    thread_run = runs <= KL_GROUP_THREADS ? threadIdx.x % runs : threadIdx.x;
  }
};

// Calls f(pixel, values) for every pixel of the thread, with a batch of loads in flight; kBack walks from the last pixel to the first.
// All threads of the CTA must call this: once the first loads are issued they call `prepare`, which may contain a barrier.
template <class Run, int kBatch, bool kBack, class P, class F>
__device__ __forceinline__ void for_pixels(const KlMat& x, const PixelWalk& walk, uint32_t run, P prepare, F f) {
  // Pixel indices fit in 32 bits, and so do the steps past the end: the grid is small.
  const uint32_t step = gridDim.x * walk.pixels;
  const bool busy = walk.thread_pixel < walk.pixels && run < walk.runs;
  uint32_t next = busy ? blockIdx.x * walk.pixels + walk.thread_pixel : x.rows;
  const auto place = [&](uint32_t pixel) { return kBack ? x.rows - 1 - pixel : pixel; };
  Run ahead[kBatch];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      if (next + i * step < x.rows) ahead[i].load(x, place(next + i * step), run * Run::kWidth);
    }
  };
  load();
  prepare();
  while (next < x.rows) {
    Run now[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) now[i] = ahead[i];
    const uint32_t pixel = next;
    next += kBatch * step;
    load();
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      if (pixel + i * step >= x.rows) continue;
      float v[Run::kWidth];
      now[i].get(v);
      f(place(pixel + i * step), v);
    }
  }
}

// Threads that reduce one group.
constexpr uint32_t kGroupLanes = KL_GROUP_THREADS / KL_GROUPS;

// Sums and sums of squares of a CTA's pixels, per group, relative to the group's first value of the first pixel. A thread keeps sums for
// each piece of kPiece channels; no piece spans two groups.
template <class Run, int kPiece>
__device__ __forceinline__ void group_sums(const KlGroupStats& p, float2* shares) {
  constexpr int kWidth = Run::kWidth, kPieces = kWidth / kPiece;
  constexpr int kBatch = kPieces > 2 ? 4 : 8;
  const PixelWalk walk(p.x.cols / kWidth);
  const uint32_t width = p.x.cols / p.groups, pieces = width / kPiece;
  const uint32_t group = threadIdx.x / kGroupLanes, lane = threadIdx.x % kGroupLanes;
  float2* partials = reinterpret_cast<float2*>(p.partials) + static_cast<uint64_t>(blockIdx.x) * p.groups;
  for (uint32_t base = 0; base < walk.runs; base += KL_GROUP_THREADS) {
    const uint32_t run = base + walk.thread_run;
    float sum[kPieces] = {}, squares[kPieces] = {}, shift[kPieces] = {};
    const auto shifts = [&] {
      if (run >= walk.runs) return;
#pragma unroll
      for (int k = 0; k < kPieces; k++) shift[k] = load_any(p.x, 0, (run * kWidth + k * kPiece) / width * width);
    };
    for_pixels<Run, kBatch, false>(p.x, walk, run, shifts, [&](uint32_t, const float(&v)[kWidth]) {
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        const float delta = v[j] - shift[j / kPiece];
        sum[j / kPiece] += delta;
        squares[j / kPiece] += delta * delta;
      }
    });
#pragma unroll
    for (int k = 0; k < kPieces; k++) shares[threadIdx.x * kPieces + k] = make_float2(sum[k], squares[k]);
    __syncthreads();
    // This pass has the pieces from `origin` on, `per_pixel` of them for each pixel: a group may begin in one pass and end in the next.
    const uint32_t origin = base * kPieces, per_pixel = min(walk.runs - base, static_cast<uint32_t>(KL_GROUP_THREADS)) * kPieces;
    float total[2] = {};
    if (group < p.groups) {
      const uint32_t begin = max(group * pieces, origin), end = min((group + 1) * pieces, origin + per_pixel);
      for (uint32_t pixel = lane; pixel < walk.pixels; pixel += kGroupLanes) {
        for (uint32_t piece = begin; piece < end; piece++) {
          const float2 s = shares[pixel * per_pixel + piece - origin];
          total[0] += s.x, total[1] += s.y;
        }
      }
    }
    sum_lanes<kGroupLanes>(total);
    if (group < p.groups && lane == 0) {
      if (base > 0) total[0] += partials[group].x, total[1] += partials[group].y;
      partials[group] = make_float2(total[0], total[1]);
    }
    __syncthreads();
  }
}

KL_ENTRY(kl_group_stats_8, KlGroupStats, KL_GROUP_THREADS, 2) {
  KL_SHARED(float2, shares, [KL_GROUP_THREADS * kVector]);
  const uint32_t width = p.x.cols / p.groups;
  if (width % kVector == 0) {
    group_sums<EightChannels, kVector>(p, shares);
  } else if (width % (kVector / 2) == 0) {
    group_sums<EightChannels, kVector / 2>(p, shares);
  } else {
    group_sums<EightChannels, 1>(p, shares);
  }
}

KL_ENTRY(kl_group_stats_any, KlGroupStats, KL_GROUP_THREADS, 3) {
  KL_SHARED(float2, shares, [KL_GROUP_THREADS]);
  group_sums<OneChannel, 1>(p, shares);
}

// The means and variances of all groups, in shared memory.
struct GroupMoments {
  double2 shares[KL_GROUP_THREADS];
  float2 stats[KL_GROUPS];

  // Reduces the partial sums that `blocks` CTAs of kl_group_stats stored for x. A thread adds the sums of every `threads_per_group`-th CTA
  // for its group.
  __device__ __forceinline__ void finish(const KlMat& x, uint32_t groups, uint64_t found, uint32_t blocks) {
    const float2* partials = reinterpret_cast<const float2*>(found);
    const uint32_t width = x.cols / groups, group = threadIdx.x % groups, threads_per_group = KL_GROUP_THREADS / groups;
    const double inverse = 1.0 / (static_cast<double>(x.rows) * width), shift = load_any(x, 0, group * width);
    double sum = 0.0, squares = 0.0;
    // Loads are issued in batches: one after the other, their latencies would take longer than the pass over the pixels.
    constexpr int kBatch = 12;
    const uint32_t first = threadIdx.x < groups * threads_per_group ? threadIdx.x / groups : blocks;
    for (uint32_t block = first; block < blocks; block += kBatch * threads_per_group) {
      float2 s[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const uint32_t from = block + i * threads_per_group;
        s[i] = from < blocks ? partials[from * groups + group] : make_float2(0.0f, 0.0f);
      }
#pragma unroll
      for (int i = 0; i < kBatch; i++) sum += s[i].x, squares += s[i].y;
    }
    shares[threadIdx.x] = make_double2(sum, squares);
    __syncthreads();
    if (threadIdx.x < groups) {
      for (uint32_t i = 1; i < threads_per_group; i++) sum += shares[i * groups + group].x, squares += shares[i * groups + group].y;
      const double delta = sum * inverse, variance = fmax(squares * inverse - delta * delta, 0.0);
      stats[group] = make_float2(static_cast<float>(shift + delta), static_cast<float>(variance));
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load(const KlMat& given) {
    if (threadIdx.x < given.rows) {
      const float* row = row_of<const float>(given, threadIdx.x);
      stats[threadIdx.x] = make_float2(row[0], row[1]);
    }
    __syncthreads();
  }
};

// Launched with one CTA.
KL_ENTRY(kl_group_stats_finish, KlGroupStats, KL_GROUP_THREADS) {
  KL_SHARED(GroupMoments, moments, );
  moments.finish(p.x, p.groups, p.partials, p.blocks);
  if (threadIdx.x < p.groups) {
    float* row = row_of<float>(p.stats, threadIdx.x);
    row[0] = moments.stats[threadIdx.x].x;
    row[1] = moments.stats[threadIdx.x].y;
  }
}

template <class Run, bool kSilu>
__device__ __forceinline__ void normalize_groups(const KlGroupNorm& p, GroupMoments& moments) {
  constexpr int kWidth = Run::kWidth;
  const PixelWalk walk(p.x.cols / kWidth);
  const uint32_t width = p.x.cols / p.groups;
  for (uint32_t base = 0; base < walk.runs; base += KL_GROUP_THREADS) {
    const uint32_t run = base + walk.thread_run, channel = run * kWidth;
    float mean[kWidth] = {}, scale[kWidth] = {}, shift[kWidth] = {};
    const auto prepare = [&] {
      if (base == 0) {
        if (p.stats.data != 0) {
          moments.load(p.stats);
        } else {
          moments.finish(p.x, p.groups, p.partials, p.blocks);
        }
      }
      if (run >= walk.runs) return;
      Run::load_weights(p.weight, channel, scale);
      Run::load_weights(p.bias, channel, shift);
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        const float2 stats = moments.stats[(channel + j) / width];
        mean[j] = stats.x;
        scale[j] *= rsqrtf(stats.y + p.eps);
      }
    };
    for_pixels<Run, 4, true>(p.x, walk, run, prepare, [&](uint32_t pixel, float(&v)[kWidth]) {
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        v[j] = (v[j] - mean[j]) * scale[j] + shift[j];
        if (kSilu) v[j] = silu(v[j]);
      }
      Run::store(p.out, pixel, channel, v);
    });
  }
}

template <class Run>
__device__ __forceinline__ void normalize_image(const KlGroupNorm& p, GroupMoments& moments) {
  if (p.silu) {
    normalize_groups<Run, true>(p, moments);
  } else {
    normalize_groups<Run, false>(p, moments);
  }
}

KL_ENTRY(kl_group_norm_8, KlGroupNorm, KL_GROUP_THREADS, 3) {
  KL_SHARED(GroupMoments, moments, );
  normalize_image<EightChannels>(p, moments);
}

KL_ENTRY(kl_group_norm_any, KlGroupNorm, KL_GROUP_THREADS, 3) {
  KL_SHARED(GroupMoments, moments, );
  normalize_image<OneChannel>(p, moments);
}
