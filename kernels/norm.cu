// Memory-bound kernels with a reduction: row norms, qk-norm with RoPE, group norm.
//
//   kl_rms_norm_*    y = x / sqrt(mean(x^2) + eps) * weight
//   kl_layer_norm_*  y = (1 + scale) * (x - mean) / sqrt(var + eps) + shift, per stream (AdaLN modulation)
//                    _1024 to _8192: aligned rows of bf16 with at most that many columns, a multiple of 8; _any: all others
//   kl_qk_norm_rope  each head of x: RMS norm with weight, times scale, then RoPE by the row's angles, in place
//                    table [rows, d]: d/2 cosines, then d/2 sines; pairs are interleaved (2i, 2i+1) or half-split (i, i + d/2)
//   kl_group_stats_*, kl_group_stats_finish    mean and variance of each group of channels over all pixels
//   kl_group_norm_*  y = (x - mean) / sqrt(var + eps) * weight + bias, then SiLU if asked; finishes the statistics itself if nothing
//                    else needs them.  _8: bf16 images in aligned runs of eight channels; _any: all others
//
// Bound: HBM. Rows are read once and stay in registers in their storage type. A warp computes squared deviations from its own mean, and
// the moments of all warps are merged behind one barrier (Chan et al. 1979), so a mean far from zero costs no precision. An image
// whose statistics are computed here is read twice, the second time from its end, which L2 still holds. Group sums are relative to one
// value of the group, which keeps them accurate where the mean is far from zero. All sums are added in a fixed order.
#include <common/math.cuh>
#include <common/reduce.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>

// ---------------------------------------------------------------------------------------------------------------- rows

constexpr uint32_t kRows = KL_NORM_ROWS;  // rows per CTA, which share the loads of modulations and the barriers

// The moments of a warp's part of a row: mean, sum of squared deviations from it (M2), count.
struct alignas(16) Moments {
  float mean, squares, count;
};

// Makes these registers opaque to the compiler, which would otherwise keep eight unpacked floats alive beside every four words.
__device__ __forceinline__ void forget(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

// a / n, correctly rounded but for rare cases: an error in the mean shows where the values of a row hardly differ from it.
__device__ __forceinline__ float divide(float a, float n) {
  const float inverse = __fdividef(1.0f, n), near = a * inverse;
  return fmaf(fmaf(-near, n, a), inverse, near);
}

// Normalises rows `first` to `first` + kRows of aligned bf16. A thread has kVecs vectors, of which only the last may lie past the end; it
// then loads the row's first vector instead, and neither counts nor stores it. A row past the end repeats the last row, with the same
// result. With kRms there is no mean and no shift, and `scale` is the weight.
template <int kThreads, int kVecs, bool kRms>
__device__ __forceinline__ void norm_rows(const KlMat& out, const KlMat& x, const KlMat& scale, const KlMat& shift, uint32_t first,
                                          float eps, Moments (&moments)[kRows][kThreads / 32]) {
  constexpr uint32_t kStep = kThreads * kVector;
  const uint32_t col = threadIdx.x * kVector;
  const bool full = col + (kVecs - 1) * kStep < x.cols;
  const uint32_t last = full ? col + (kVecs - 1) * kStep : 0;
  const auto column = [&](int i) { return i < kVecs - 1 ? col + i * kStep : last; };
  const auto row = [&](int r) { return min(first + r, x.rows - 1); };

  uint4 values[kRows][kVecs];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const bf16* from = row_of<const bf16>(x, row(r));
#pragma unroll
    for (int i = 0; i < kVecs; i++) values[r][i] = __ldcs(reinterpret_cast<const uint4*>(from + column(i)));
  }
  uint4 mul[kVecs], add[kVecs];
  if constexpr (!kRms) {
    const bf16 *scales = row_of<const bf16>(scale, 0), *shifts = row_of<const bf16>(shift, 0);
#pragma unroll
    for (int i = 0; i < kVecs; i++) mul[i] = load_now(scales + column(i)), add[i] = load_now(shifts + column(i));
  }

  // Both rows go through each step together, so that their shuffles overlap.
  const float count = kVector * ((kVecs - 1) * 32 + __popc(__ballot_sync(0xffffffffu, full)));
  float mean[kRows] = {}, squares[kRows] = {};
  const auto warp_sums = [](float(&v)[kRows]) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int r = 0; r < kRows; r++) v[r] += __shfl_xor_sync(0xffffffffu, v[r], offset);
    }
  };
  if constexpr (!kRms) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
#pragma unroll
      for (int i = 0; i < kVecs; i++) {
        float v[kVector];
        unpack_bf16(values[r][i], v);
        const float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
        mean[r] += i < kVecs - 1 || full ? sum : 0.0f;
      }
    }
    warp_sums(mean);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      mean[r] = count > 0.0f ? divide(mean[r], count) : 0.0f;
#pragma unroll
      for (int i = 0; i < kVecs; i++) forget(values[r][i]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; r++) {
#pragma unroll
    for (int i = 0; i < kVecs; i++) {
      float v[kVector], sum = 0.0f;
      unpack_bf16(values[r][i], v);
#pragma unroll
      for (int j = 0; j < kVector; j++) {
        const float d = kRms ? v[j] : v[j] - mean[r];
        sum += d * d;
      }
      squares[r] += i < kVecs - 1 || full ? sum : 0.0f;
    }
  }
  warp_sums(squares);
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    if (threadIdx.x % 32 == 0) moments[r][threadIdx.x / 32] = Moments{mean[r], squares[r], count};
  }
  __syncthreads();

  const float n = static_cast<float>(x.cols);
  float rstd[kRows], minus[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    float whole = 0.0f, deviations = 0.0f;
    if constexpr (!kRms) {
#pragma unroll 4
      for (int w = 1; w < kThreads / 32; w++) whole += (moments[r][w].mean - moments[r][0].mean) * moments[r][w].count;
      whole = moments[r][0].mean + __fdividef(whole, n);
    }
#pragma unroll 4
    for (int w = 0; w < kThreads / 32; w++) {
      const Moments m = moments[r][w];
      const float d = m.mean - whole;
      deviations += kRms ? m.squares : m.squares + d * d * m.count;
    }
    // Truncated to 16 significant bits, so that its product with a bf16 is exact: a value equal to the mean becomes zero, however large.
    rstd[r] = __uint_as_float(__float_as_uint(rsqrtf(__fdividef(deviations, n) + eps)) & 0xffffff00u);
    minus[r] = -whole * rstd[r];
  }
#pragma unroll
  for (int i = 0; i < kVecs; i++) {
#pragma unroll
    for (int r = 0; r < kRows; r++) forget(values[r][i]);
    if constexpr (!kRms) forget(mul[i]), forget(add[i]);
  }

#pragma unroll
  for (int i = 0; i < kVecs; i++) {
    float a[kVector], b[kVector];
    if constexpr (kRms) {
      load_vector(row_of<const float>(scale, 0) + column(i), a);
    } else {
      unpack_bf16(mul[i], a);
      unpack_bf16(add[i], b);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float v[kVector];
      unpack_bf16(values[r][i], v);
#pragma unroll
      for (int j = 0; j < kVector; j++) v[j] = kRms ? v[j] * rstd[r] * a[j] : (v[j] * rstd[r] + minus[r]) * (1.0f + a[j]) + b[j];
      if (i < kVecs - 1 || full) store_vector(row_of<bf16>(out, row(r)) + column(i), v);
    }
  }
}

// Entry points for rows of at most kVecs * kThreads vectors, and more than (kVecs - 1) * kThreads. Each number of vectors has its own:
// one kernel for all would allocate the registers of the largest.
#define KL_ROW_NORMS(cols, kThreads, kVecs, layer_blocks, rms_blocks)                                                  \
  static_assert(kThreads * kVecs * kVector == cols, "the name says another width");                                    \
  KL_ENTRY(kl_layer_norm_##cols, KlLayerNorm, kThreads, layer_blocks) {                                                \
    KL_SHARED(Moments, moments, [kRows][kThreads / 32]);                                                               \
    const uint32_t blocks = ceil_div(p.stream[0].x.rows, kRows);                                                       \
    const bool second = blockIdx.x >= blocks;                                                                          \
    const KlModulated& s = p.stream[second];                                                                           \
    const uint32_t first = (second ? blockIdx.x - blocks : blockIdx.x) * kRows;                                        \
    norm_rows<kThreads, kVecs, false>(s.out, s.x, s.scale, s.shift, first, p.eps, moments);                            \
  }                                                                                                                    \
  KL_ENTRY(kl_rms_norm_##cols, KlRmsNorm, kThreads, rms_blocks) {                                                      \
    KL_SHARED(Moments, moments, [kRows][kThreads / 32]);                                                               \
    norm_rows<kThreads, kVecs, true>(p.out, p.x, p.weight, p.weight, blockIdx.x * kRows, p.eps, moments);              \
  }

KL_ROW_NORMS(1024, KL_NORM_THREADS, 1, 6, 8)
KL_ROW_NORMS(2048, KL_NORM_THREADS, 2, 6, 8)
KL_ROW_NORMS(3072, KL_NORM_THREADS, 3, 6, 7)
KL_ROW_NORMS(4096, KL_NORM_THREADS, 4, 5, 7)
KL_ROW_NORMS(8192, KL_NORM_THREADS_WIDE, 2, 1, 1)

// The sum of f(column) over all columns, by a CTA of KL_NORM_THREADS threads; every thread gets it.
template <class F>
__device__ __forceinline__ float sum_of_columns(uint32_t cols, F f) {
  KL_SHARED(float, warps, [KL_NORM_THREADS / 32]);
  float sum = 0.0f;
  for (uint32_t col = threadIdx.x; col < cols; col += KL_NORM_THREADS) sum += f(col);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < KL_NORM_THREADS / 32; warp++) sum += warps[warp];
  return sum;
}

// Rows of any width, dtype and alignment, one per CTA, read again for each pass.
KL_ENTRY(kl_rms_norm_any, KlRmsNorm, KL_NORM_THREADS) {
  const uint64_t row = blockIdx.x;
  const float squares = sum_of_columns(p.x.cols, [&](uint32_t col) {
    const float v = load_any(p.x, row, col);
    return v * v;
  });
  const float scale = rsqrtf(squares / static_cast<float>(p.x.cols) + p.eps);
  for (uint32_t col = threadIdx.x; col < p.x.cols; col += KL_NORM_THREADS) {
    store_any(p.out, row, col, load_any(p.x, row, col) * scale * load<float>(p.weight, 0, col));
  }
}

KL_ENTRY(kl_layer_norm_any, KlLayerNorm, KL_NORM_THREADS) {
  const bool second = blockIdx.x >= p.stream[0].x.rows;
  const KlModulated& s = p.stream[second];
  const uint64_t row = second ? blockIdx.x - p.stream[0].x.rows : blockIdx.x;
  const float n = static_cast<float>(s.x.cols);
  const float mean = sum_of_columns(s.x.cols, [&](uint32_t col) { return load_any(s.x, row, col); }) / n;
  const float squares = sum_of_columns(s.x.cols, [&](uint32_t col) {
    const float d = load_any(s.x, row, col) - mean;
    return d * d;
  });
  const float rstd = rsqrtf(squares / n + p.eps);
  for (uint32_t col = threadIdx.x; col < s.x.cols; col += KL_NORM_THREADS) {
    const float v = (load_any(s.x, row, col) - mean) * rstd;
    store_any(s.out, row, col, (1.0f + load_any(s.scale, 0, col)) * v + load_any(s.shift, 0, col));
  }
}

// --------------------------------------------------------------------------------------------------- qk-norm and RoPE

// Loads and stores of two adjacent values.
__device__ __forceinline__ float2 load_pair(const float* from) { return *reinterpret_cast<const float2*>(from); }
__device__ __forceinline__ float2 load_pair(const bf16* from) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
}
__device__ __forceinline__ void store_pair(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }
__device__ __forceinline__ void store_pair(bf16* to, float a, float b) { *reinterpret_cast<uint32_t*>(to) = pack_bf16(a, b); }

constexpr uint32_t kQkNormRopeThreads = KL_NORM_THREADS;

// Heads of 128: a lane has two pairs of each head, and keeps their angles and weights in registers for all heads of the row.
template <class X, bool kInterleaved>
__device__ __forceinline__ void qk_norm_rope_128(const KlQkHeads& part, uint64_t row, uint32_t first, uint32_t last, float eps) {
  const uint32_t lane = threadIdx.x % 32;
  // The lane loads two adjacent elements twice: from 4 l and 4 l + 2 (interleaved), or from 2 l and 64 + 2 l (half-split).
  const uint32_t low = kInterleaved ? 4 * lane : 2 * lane, high = kInterleaved ? low + 2 : low + 64;
  const float *angles = row_of<const float>(part.table, row), *weight = row_of<const float>(part.weight, 0);
  const uint32_t pair = 2 * lane;  // in both layouts the lane has pairs 2 l and 2 l + 1
  const float c0 = angles[pair], c1 = angles[pair + 1], s0 = angles[64 + pair], s1 = angles[64 + pair + 1];
  const float w0 = weight[low], w1 = weight[low + 1], w2 = weight[high], w3 = weight[high + 1];
  X* at = row_of<X>(part.x, row);
#pragma unroll 4
  for (uint32_t head = first; head < last; head++) {
    X* const x = at + head * 128;
    const float2 a = load_pair(x + low), b = load_pair(x + high);
    const float squares = warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y);
    const float scale = part.scale * rsqrtf(squares * (1.0f / 128.0f) + eps);
    const float v0 = a.x * scale * w0, v1 = a.y * scale * w1, v2 = b.x * scale * w2, v3 = b.y * scale * w3;
    if (kInterleaved) {
      store_pair(x + low, v0 * c0 - v1 * s0, v0 * s0 + v1 * c0);
      store_pair(x + high, v2 * c1 - v3 * s1, v2 * s1 + v3 * c1);
    } else {
      store_pair(x + low, v0 * c0 - v2 * s0, v1 * c1 - v3 * s1);
      store_pair(x + high, v0 * s0 + v2 * c0, v1 * s1 + v3 * c1);
    }
  }
}

// Heads of any even size at any alignment.
template <class X>
__device__ __forceinline__ void qk_norm_rope_any(const KlQkHeads& part, uint64_t row, uint32_t first, uint32_t last, uint32_t d,
                                             bool interleaved, float eps) {
  const uint32_t lane = threadIdx.x % 32, half = d / 2;
  const float *angles = row_of<const float>(part.table, row), *weight = row_of<const float>(part.weight, 0);
  for (uint32_t head = first; head < last; head++) {
    X* const x = row_of<X>(part.x, row) + static_cast<uint64_t>(head) * d;
    float squares = 0.0f;
    for (uint32_t i = lane; i < d; i += 32) squares += to_float(x[i]) * to_float(x[i]);
    const float scale = part.scale * rsqrtf(warp_sum(squares) / static_cast<float>(d) + eps);
    for (uint32_t pair = lane; pair < half; pair += 32) {
      const uint32_t i = interleaved ? 2 * pair : pair, j = interleaved ? i + 1 : pair + half;
      const float a = to_float(x[i]) * scale * weight[i], b = to_float(x[j]) * scale * weight[j];
      const float c = angles[pair], s = angles[half + pair];
      x[i] = from_float<X>(a * c - b * s);
      x[j] = from_float<X>(a * s + b * c);
    }
    __syncwarp();
  }
}

// A warp takes one row, with the rows of all parts in sequence along the grid's x, and KL_HEADS_PER_WARP heads of it, along y.
KL_ENTRY(kl_qk_norm_rope, KlQkNormRope, KL_NORM_THREADS) {
  uint64_t row = blockIdx.x * (kQkNormRopeThreads / 32) + threadIdx.x / 32;
  uint32_t index = 0;
  while (index < KL_QK_PARTS && row >= p.part[index].x.rows) row -= p.part[index++].x.rows;
  if (index == KL_QK_PARTS) return;
  const KlQkHeads& part = p.part[index];
  const uint32_t heads = part.x.cols / p.head_dim, first = blockIdx.y * KL_HEADS_PER_WARP;
  const uint32_t last = min(heads, first + KL_HEADS_PER_WARP);
  const bool interleaved = p.style == KL_ROPE_INTERLEAVED;
  with_type(part.x.dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    const bool pairs = part.x.data % (2 * sizeof(X)) == 0 && part.x.stride % 2 == 0;
    if (p.head_dim != 128 || !pairs) {
      qk_norm_rope_any<X>(part, row, first, last, p.head_dim, interleaved, p.eps);
    } else if (interleaved) {
      qk_norm_rope_128<X, true>(part, row, first, last, p.eps);
    } else {
      qk_norm_rope_128<X, false>(part, row, first, last, p.eps);
    }
  });
}

// ---------------------------------------------------------------------------------------------------------- group norm

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

// How a CTA of KL_GROUP_THREADS threads walks over pixels: each thread keeps to the same run of channels, so that per-channel values stay
// in registers. Threads beyond the last whole pixel are idle. Images with more runs of channels than a CTA has threads are walked
// over several times.
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
  // Pixel indices fit in 32 bits, and so do the steps beyond the end: the grid is small.
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

// Sums and sums of squares of a CTA's pixels, per group, relative to the group's first value of the first pixel. A thread keeps them for
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
    float2 total = make_float2(0.0f, 0.0f);
    if (group < p.groups) {
      const uint32_t begin = max(group * pieces, origin), end = min((group + 1) * pieces, origin + per_pixel);
      for (uint32_t pixel = lane; pixel < walk.pixels; pixel += kGroupLanes) {
        for (uint32_t piece = begin; piece < end; piece++) {
          const float2 s = shares[pixel * per_pixel + piece - origin];
          total.x += s.x, total.y += s.y;
        }
      }
    }
#pragma unroll
    for (int offset = kGroupLanes / 2; offset > 0; offset /= 2) {
      total.x += __shfl_xor_sync(0xffffffffu, total.x, offset);
      total.y += __shfl_xor_sync(0xffffffffu, total.y, offset);
    }
    if (group < p.groups && lane == 0) {
      if (base > 0) total.x += partials[group].x, total.y += partials[group].y;
      partials[group] = total;
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

  // Reduces the partial sums that `blocks` CTAs of kl_group_stats stored for x. A thread adds those of every n-th CTA for its group, n
  // being `threads_per_group`.
  __device__ __forceinline__ void finish(const KlMat& x, uint32_t groups, uint64_t found, uint32_t blocks) {
    const float2* partials = reinterpret_cast<const float2*>(found);
    const uint32_t width = x.cols / groups, group = threadIdx.x % groups, threads_per_group = KL_GROUP_THREADS / groups;
    const double inverse = 1.0 / (static_cast<double>(x.rows) * width), shift = load_any(x, 0, group * width);
    double sum = 0.0, squares = 0.0;
    // Loads are issued in batches: their latencies one after the other would take longer than the pass over the pixels.
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
__device__ __forceinline__ void normalise_groups(const KlGroupNorm& p, GroupMoments& moments) {
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
__device__ __forceinline__ void normalise_image(const KlGroupNorm& p, GroupMoments& moments) {
  if (p.silu) {
    normalise_groups<Run, true>(p, moments);
  } else {
    normalise_groups<Run, false>(p, moments);
  }
}

KL_ENTRY(kl_group_norm_8, KlGroupNorm, KL_GROUP_THREADS, 3) {
  KL_SHARED(GroupMoments, moments, );
  normalise_image<EightChannels>(p, moments);
}

KL_ENTRY(kl_group_norm_any, KlGroupNorm, KL_GROUP_THREADS, 3) {
  KL_SHARED(GroupMoments, moments, );
  normalise_image<OneChannel>(p, moments);
}
