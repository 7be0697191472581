// Memory-bound kernels with a reduction.
//
//   kl_rms_norm      y = x / sqrt(mean(x^2) + eps) * weight                                one block two rows
//   kl_layer_norm    y = (1 + scale) * (x - mean) / sqrt(var + eps) + shift, per stream    one block two rows
//   kl_head_norm     each head of x: RMS norm with weight, then rotation by the row's angles, in place
//                    table [rows, d]: d/2 cosines, then d/2 sines; pairs are neighbours (2i, 2i+1) or halves (i, i + d/2)
//   kl_group_stats, kl_group_stats_finish    mean and variance of each group of channels over all pixels
//   kl_group_norm    y = (x - mean) / sqrt(var + eps) * weight + bias, then silu if asked
//
// Bound: HBM. Rows of up to kRowLimit values in bf16 are read once and kept in registers; sums are f32, deviations are taken from the
// mean in a second pass over the registers. Group sums are taken relative to one value of the group, which keeps them exact
// where the mean is far from zero, and partial sums are added in a fixed order.
#include "common.cuh"

// ---------------------------------------------------------------------------------------------------------------- rows

constexpr int kRowThreads = KL_NORM_THREADS;
constexpr int kRowVectors = 4;  // per thread
constexpr uint32_t kRowLimit = kRowThreads * kRowVectors * kVector;
constexpr int kRows = KL_NORM_ROWS;  // of a block at once: weights and barriers are shared by them

__device__ __forceinline__ uint32_t column_of(int i) { return (i * kRowThreads + threadIdx.x) * kVector; }

// Sums over a block for kRows rows at once, in every thread, always added in the same order. May be called again at once: the result
// is read from the other half of `shared` than the call before it wrote.
struct RowSums {
  float (*shared)[kRowThreads / 32][kRows];
  int half = 0;

  __device__ explicit RowSums(float (&memory)[2][kRowThreads / 32][kRows]) : shared(memory) {}

  __device__ __forceinline__ void operator()(float (&v)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      v[r] = warp_sum(v[r]);
      if (threadIdx.x % 32 == 0) shared[half][threadIdx.x / 32][r] = v[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      v[r] = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kRowThreads / 32; warp++) v[r] += shared[half][warp][r];
    }
    half ^= 1;
  }
};

// Rows of x: bf16 in registers, as it is stored, where it fits; else read again from the caches. f32 is for comparing, not for speed,
// and its registers would cost bf16 half the blocks.
template <class X>
struct HeldRows {
  const KlMat& x;
  uint64_t first;
  bool held;
  uint4 values[kRows][kRowVectors];

  __device__ __forceinline__ HeldRows(const KlMat& m, uint64_t first_row, bool aligned) : x(m), first(first_row) {
    held = sizeof(X) == sizeof(bf16) && aligned && m.cols <= kRowLimit;
    if (held) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
#pragma unroll
        for (int i = 0; i < kRowVectors; i++) {
          if (column_of(i) < x.cols && first + r < x.rows) {
            // Read once, so not worth keeping: weights and modulations are what the cache is for.
            values[r][i] = __ldcs(reinterpret_cast<const uint4*>(row_of<const X>(x, first + r) + column_of(i)));
          }
        }
      }
    }
  }

  // The thread's share of each row's sum of f(row, value).
  template <class F>
  __device__ __forceinline__ void sum(float (&total)[kRows], F f) const {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      total[r] = 0.0f;
      if (first + r >= x.rows) continue;
      if (held) {
#pragma unroll
        for (int i = 0; i < kRowVectors; i++) {
          if (column_of(i) >= x.cols) continue;
          float v[kVector];
          unpack(values[r][i], v);
#pragma unroll
          for (int j = 0; j < kVector; j++) total[r] += f(r, v[j]);
        }
      } else {
        const X* row = row_of<const X>(x, first + r);
        for (uint32_t col = threadIdx.x; col < x.cols; col += kRowThreads) total[r] += f(r, to_float(row[col]));
      }
    }
  }

  // Stores what `vector(column)` prepares for all rows and `f(row, value, place)` makes of each value, or `single(row, value, column)`
  // where rows are not held.
  template <class Out, class V, class F, class S>
  __device__ __forceinline__ void store(const KlMat& out, V vector, F f, S single) const {
    if (held) {
#pragma unroll
      for (int i = 0; i < kRowVectors; i++) {
        if (column_of(i) >= x.cols) continue;
        vector(column_of(i));
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          if (first + r >= x.rows) continue;
          float v[kVector];
          unpack(values[r][i], v);
#pragma unroll
          for (int j = 0; j < kVector; j++) v[j] = f(r, v[j], j);
          store_vector(row_of<Out>(out, first + r) + column_of(i), v);
        }
      }
    } else {
      for (int r = 0; r < kRows && first + r < x.rows; r++) {
        const X* row = row_of<const X>(x, first + r);
        Out* to = row_of<Out>(out, first + r);
        for (uint32_t col = threadIdx.x; col < x.cols; col += kRowThreads) to[col] = from_float<Out>(single(r, to_float(row[col]), col));
      }
    }
  }
};

KL_ENTRY(kl_rms_norm, KlRmsNorm, KL_NORM_THREADS) {
  __shared__ float memory[2][kRowThreads / 32][kRows];
  RowSums sums(memory);
  const bool aligned = vectors_fit(p.x) && vectors_fit(p.out) && vectors_fit(p.weight);
  const float* weight = row_of<const float>(p.weight, 0);
  with_type(p.out.dtype, [&](auto o) {
    with_type(p.x.dtype, [&](auto t) {
      using Out = typename decltype(o)::type;
      const HeldRows<typename decltype(t)::type> rows(p.x, static_cast<uint64_t>(blockIdx.x) * kRows, aligned);
      float scale[kRows], w[kVector];
      rows.sum(scale, [](int, float v) { return v * v; });
      sums(scale);
#pragma unroll
      for (int r = 0; r < kRows; r++) scale[r] = rsqrtf(scale[r] / static_cast<float>(p.x.cols) + p.eps);
      rows.template store<Out>(
          p.out, [&](uint32_t col) { load_vector(weight + col, w); }, [&](int r, float v, int j) { return v * scale[r] * w[j]; },
          [&](int r, float v, uint32_t col) { return v * scale[r] * weight[col]; });
    });
  });
}

KL_ENTRY(kl_layer_norm, KlLayerNorm, KL_NORM_THREADS) {
  __shared__ float memory[2][kRowThreads / 32][kRows];
  RowSums sums(memory);
  const uint32_t blocks = ceil_div(p.stream[0].x.rows, static_cast<uint32_t>(kRows));
  const bool second = blockIdx.x >= blocks;
  const KlModulated& s = p.stream[second];
  const uint64_t first = static_cast<uint64_t>(second ? blockIdx.x - blocks : blockIdx.x) * kRows;
  const bool aligned = vectors_fit(s.x) && vectors_fit(s.out) && vectors_fit(s.shift) && vectors_fit(s.scale);
  with_type(s.out.dtype, [&](auto o) {
    with_type(s.x.dtype, [&](auto t) {
      with_type(s.shift.dtype, [&](auto u) {
        using Out = typename decltype(o)::type;
        using M = typename decltype(u)::type;
        const M *shift = row_of<const M>(s.shift, 0), *scale = row_of<const M>(s.scale, 0);
        const HeldRows<typename decltype(t)::type> rows(s.x, first, aligned);
        const float n = static_cast<float>(s.x.cols);
        float mean[kRows], rstd[kRows], a[kVector], b[kVector];
        rows.sum(mean, [](int, float v) { return v; });
        sums(mean);
#pragma unroll
        for (int r = 0; r < kRows; r++) mean[r] /= n;
        rows.sum(rstd, [&](int r, float v) { return (v - mean[r]) * (v - mean[r]); });
        sums(rstd);
#pragma unroll
        for (int r = 0; r < kRows; r++) rstd[r] = rsqrtf(rstd[r] / n + p.eps);
        rows.template store<Out>(
            s.out,
            [&](uint32_t col) {
              load_vector(scale + col, a);
              load_vector(shift + col, b);
            },
            [&](int r, float v, int j) { return (1.0f + a[j]) * ((v - mean[r]) * rstd[r]) + b[j]; },
            [&](int r, float v, uint32_t col) {
              return (1.0f + to_float(scale[col])) * ((v - mean[r]) * rstd[r]) + to_float(shift[col]);
            });
      });
    });
  });
}

// --------------------------------------------------------------------------------------------------------------- heads

// Two neighbouring values.
__device__ __forceinline__ float2 load_pair(const float* from) { return *reinterpret_cast<const float2*>(from); }
__device__ __forceinline__ float2 load_pair(const bf16* from) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
}
__device__ __forceinline__ void store_pair(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }
__device__ __forceinline__ void store_pair(bf16* to, float a, float b) { *reinterpret_cast<uint32_t*>(to) = pack(a, b); }

constexpr uint32_t kHeadThreads = KL_NORM_THREADS;

// Heads of 128 values, where a lane takes two pairs and keeps its angles and weights in registers for all heads of the row.
template <class X, bool kInterleaved>
__device__ __forceinline__ void heads_of_128(const KlHeads& part, uint64_t row, uint32_t first, uint32_t last, float eps) {
  const uint32_t lane = threadIdx.x % 32;
  // First elements of the lane's two runs of two: 4 l and 4 l + 2, or 2 l and 64 + 2 l.
  const uint32_t low = kInterleaved ? 4 * lane : 2 * lane, high = kInterleaved ? low + 2 : low + 64;
  const float *angles = row_of<const float>(part.table, row), *weight = row_of<const float>(part.weight, 0);
  const uint32_t pair = 2 * lane;  // both styles: pairs 2 l and 2 l + 1
  const float c0 = angles[pair], c1 = angles[pair + 1], s0 = angles[64 + pair], s1 = angles[64 + pair + 1];
  const float w0 = weight[low], w1 = weight[low + 1], w2 = weight[high], w3 = weight[high + 1];
  X* at = row_of<X>(part.x, row);
#pragma unroll 4
  for (uint32_t head = first; head < last; head++) {
    X* const x = at + head * 128;
    const float2 a = load_pair(x + low), b = load_pair(x + high);
    const float squares = warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y);
    const float scale = rsqrtf(squares * (1.0f / 128.0f) + eps);
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

// Heads of any even size at any address.
template <class X>
__device__ __forceinline__ void heads_of_any(const KlHeads& part, uint64_t row, uint32_t first, uint32_t last, uint32_t d,
                                             bool interleaved, float eps) {
  const uint32_t lane = threadIdx.x % 32, half = d / 2;
  const float *angles = row_of<const float>(part.table, row), *weight = row_of<const float>(part.weight, 0);
  for (uint32_t head = first; head < last; head++) {
    X* const x = row_of<X>(part.x, row) + static_cast<uint64_t>(head) * d;
    float squares = 0.0f;
    for (uint32_t i = lane; i < d; i += 32) squares += to_float(x[i]) * to_float(x[i]);
    const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(d) + eps);
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

// Warps along x take the rows of one part after those of another; blocks along y take KL_HEADS_PER_WARP heads each.
KL_ENTRY(kl_head_norm, KlHeadNorm, KL_NORM_THREADS) {
  uint64_t row = blockIdx.x * (kHeadThreads / 32) + threadIdx.x / 32;
  uint32_t index = 0;
  while (index < KL_HEAD_PARTS && row >= p.part[index].x.rows) row -= p.part[index++].x.rows;
  if (index == KL_HEAD_PARTS) return;
  const KlHeads& part = p.part[index];
  const uint32_t heads = part.x.cols / p.head_dim, first = blockIdx.y * KL_HEADS_PER_WARP;
  const uint32_t last = min(heads, first + KL_HEADS_PER_WARP);
  const bool interleaved = p.style == KL_ROPE_INTERLEAVED;
  with_type(part.x.dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    const bool pairs = part.x.data % (2 * sizeof(X)) == 0 && part.x.stride % 2 == 0;
    if (p.head_dim != 128 || !pairs) {
      heads_of_any<X>(part, row, first, last, p.head_dim, interleaved, p.eps);
    } else if (interleaved) {
      heads_of_128<X, true>(part, row, first, last, p.eps);
    } else {
      heads_of_128<X, false>(part, row, first, last, p.eps);
    }
  });
}

// -------------------------------------------------------------------------------------------------------------- groups

// How a block of KL_GROUP_THREADS threads walks over pixels: each thread keeps to the same run of channels, so that what
// belongs to the channels stays in registers. Threads that do not make up a whole pixel rest. Images of more channels than a
// block has threads for are walked over several times.
template <int kWidth>
struct Walk {
  uint32_t runs, pixels, thread_pixel, thread_run;

  __device__ explicit Walk(uint32_t channels) {
    runs = channels / kWidth;
    pixels = max(1u, KL_GROUP_THREADS / runs);
    thread_pixel = runs <= KL_GROUP_THREADS ? threadIdx.x / runs : 0;
    thread_run = runs <= KL_GROUP_THREADS ? threadIdx.x % runs : threadIdx.x;
  }

  // Calls f(channel) for each run of channels that the thread is responsible for.
  template <class F>
  __device__ __forceinline__ void channels(F f) const {
    if (thread_pixel >= pixels) return;
    for (uint32_t run = thread_run; run < runs; run += KL_GROUP_THREADS) f(run * kWidth);
  }
};

// A run of channels as it is stored.
template <class X, int kWidth>
struct Run {
  static constexpr int kWords = kWidth == kVector ? sizeof(X) * kVector / 16 : 1;
  uint4 words[kWords];

  __device__ __forceinline__ void load(const X* from) {
    if constexpr (kWidth == kVector) {
#pragma unroll
      for (int i = 0; i < kWords; i++) words[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
      words[0].x = __float_as_uint(to_float(*from));
    }
  }

  __device__ __forceinline__ void get(float (&v)[kWidth]) const {
    if constexpr (kWidth == 1) {
      v[0] = __uint_as_float(words[0].x);
    } else if constexpr (kWords == 1) {
      unpack(words[0], v);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i++) {
        const uint32_t w[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) v[4 * i + j] = __uint_as_float(w[j]);
      }
    }
  }
};

// Calls f(pixel, values) for every pixel of the thread's, a batch of loads at a time. The first are under way when `prepare` is called,
// which loads what f needs beside them.
template <class X, int kWidth, class P, class F>
__device__ __forceinline__ void for_pixels(const KlMat& x, const Walk<kWidth>& walk, uint32_t channel, P prepare, F f) {
  constexpr int kBatch = sizeof(X) == sizeof(bf16) ? 4 : 2;
  // An image has fewer pixels than 32 bits count, and a grid is small beside them.
  const uint32_t step = gridDim.x * walk.pixels;
  uint32_t pixel = blockIdx.x * walk.pixels + walk.thread_pixel;
  Run<X, kWidth> runs[kBatch];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      if (pixel + i * step < x.rows) runs[i].load(row_of<const X>(x, pixel + i * step) + channel);
    }
  };
  load();
  prepare();
  while (pixel < x.rows) {
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      if (pixel + i * step >= x.rows) continue;
      float v[kWidth];
      runs[i].get(v);
      f(pixel + i * step, v);
    }
    pixel += kBatch * step;
    load();
  }
}

// Sums and sums of squares of a block's pixels, per group, relative to the group's first value of the first pixel. Each thread
// adds its channels in shared memory one after the other, in the order of the threads.
template <class X, int kWidth>
__device__ __forceinline__ void group_sums(const KlGroupStats& p, float2* thread_sums) {
  const Walk<kWidth> walk(p.x.cols);
  const uint32_t width = p.x.cols / p.groups;
  const X* first = row_of<const X>(p.x, 0);
  double2* partials = reinterpret_cast<double2*>(p.partials) + static_cast<uint64_t>(blockIdx.x) * p.groups;
  // A thread's channels may lie in several groups, so sums are kept per channel until the end.
  for (uint32_t base = 0; base < walk.runs; base += KL_GROUP_THREADS) {
    const uint32_t run = base + walk.thread_run;
    const bool busy = walk.thread_pixel < walk.pixels && run < walk.runs;
    float sum[kWidth] = {}, squares[kWidth] = {}, shift[kWidth] = {};
    if (busy) {
      const auto shifts = [&] {
#pragma unroll
        for (int j = 0; j < kWidth; j++) shift[j] = to_float(first[(run * kWidth + j) / width * width]);
      };
      for_pixels<X, kWidth>(p.x, walk, run * kWidth, shifts, [&](uint32_t, const float(&v)[kWidth]) {
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
          const float delta = v[j] - shift[j];
          sum[j] += delta;
          squares[j] += delta * delta;
        }
      });
    }
#pragma unroll
    for (int j = 0; j < kWidth; j++) thread_sums[threadIdx.x * kWidth + j] = make_float2(sum[j], squares[j]);
    __syncthreads();
    // One thread a group; a group may begin in one round of channels and end in the next.
    const uint32_t round = min(walk.runs - base, static_cast<uint32_t>(KL_GROUP_THREADS)) * kWidth, origin = base * kWidth;
    for (uint32_t group = threadIdx.x; group < p.groups; group += KL_GROUP_THREADS) {
      double2 total = base == 0 ? make_double2(0.0, 0.0) : partials[group];
      const uint32_t begin = max(group * width, origin), end = min((group + 1) * width, origin + round);
      for (uint32_t channel = begin; channel < end; channel++) {
        for (uint32_t pixel = 0; pixel < walk.pixels; pixel++) {
          const uint32_t thread = pixel * min(walk.runs, static_cast<uint32_t>(KL_GROUP_THREADS)) + (channel - origin) / kWidth;
          const float2 s = thread_sums[thread * kWidth + (channel - origin) % kWidth];
          total.x += s.x;
          total.y += s.y;
        }
      }
      partials[group] = total;
    }
    __syncthreads();
  }
}

KL_ENTRY(kl_group_stats, KlGroupStats, KL_GROUP_THREADS, 3) {
  __shared__ float2 thread_sums[KL_GROUP_THREADS * kVector];
  with_type(p.x.dtype, [&](auto t) {
    using X = typename decltype(t)::type;
    if (vectors_fit(p.x)) {
      group_sums<X, kVector>(p, thread_sums);
    } else {
      group_sums<X, 1>(p, thread_sums);
    }
  });
}

// One block a group: threads add every 128th block's share, then each other's, always in the same order.
KL_ENTRY(kl_group_stats_finish, KlGroupStats, KL_NORM_THREADS) {
  __shared__ double2 warps[KL_NORM_THREADS / 32];
  const double2* partials = reinterpret_cast<const double2*>(p.partials);
  const uint32_t group = blockIdx.x, width = p.x.cols / p.groups;
  double sum = 0.0, squares = 0.0;
  for (uint64_t block = threadIdx.x; block < p.blocks; block += KL_NORM_THREADS) {
    const double2 s = partials[block * p.groups + group];
    sum += s.x;
    squares += s.y;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_double2(sum, squares);
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = squares = 0.0;
    for (const double2& warp : warps) sum += warp.x, squares += warp.y;
    const double n = static_cast<double>(p.x.rows) * width, delta = sum / n;
    float* stats = row_of<float>(p.stats, group);
    stats[0] = static_cast<float>(load_any(p.x, 0, static_cast<uint64_t>(group) * width) + delta);
    stats[1] = static_cast<float>(fmax(squares / n - delta * delta, 0.0));
  }
}

template <class Out, class X, int kWidth, bool kSilu>
__device__ __forceinline__ void normalise_groups(const KlGroupNorm& p) {
  const Walk<kWidth> walk(p.x.cols);
  const uint32_t width = p.x.cols / p.groups;
  const float *weight = row_of<const float>(p.weight, 0), *bias = row_of<const float>(p.bias, 0);
  walk.channels([&](uint32_t channel) {
    float mean[kWidth], scale[kWidth], shift[kWidth];
    const auto prepare = [&] {
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        const float* stats = row_of<const float>(p.stats, (channel + j) / width);
        mean[j] = stats[0];
        scale[j] = weight[channel + j] * rsqrtf(stats[1] + p.eps);
        shift[j] = bias[channel + j];
      }
    };
    for_pixels<X, kWidth>(p.x, walk, channel, prepare, [&](uint32_t pixel, float(&v)[kWidth]) {
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        v[j] = (v[j] - mean[j]) * scale[j] + shift[j];
        if (kSilu) v[j] = silu(v[j]);
      }
      Out* to = row_of<Out>(p.out, pixel) + channel;
      if constexpr (kWidth == kVector) {
        store_vector(to, v);
      } else {
        *to = from_float<Out>(v[0]);
      }
    });
  });
}

template <class Out, class X, bool kSilu>
__device__ __forceinline__ void normalise_image(const KlGroupNorm& p) {
  if (vectors_fit(p.x) && vectors_fit(p.out)) {
    normalise_groups<Out, X, kVector, kSilu>(p);
  } else {
    normalise_groups<Out, X, 1, kSilu>(p);
  }
}

KL_ENTRY(kl_group_norm, KlGroupNorm, KL_GROUP_THREADS, 3) {
  with_type(p.out.dtype, [&](auto o) {
    with_type(p.x.dtype, [&](auto t) {
      using Out = typename decltype(o)::type;
      using X = typename decltype(t)::type;
      if (p.silu) {
        normalise_image<Out, X, true>(p);
      } else {
        normalise_image<Out, X, false>(p);
      }
    });
  });
}
