// Memory-bound kernels with a reduction.
//
//   kl_rms_norm      y = x / sqrt(mean(x^2) + eps) * weight                                one block a row
//   kl_layer_norm    y = (1 + scale) * (x - mean) / sqrt(var + eps) + shift, per stream    one block a row
//   kl_head_norm     each head of x: RMS norm with weight, then rotation by the row's angles, in place
//                    table [rows, d]: d/2 cosines, then d/2 sines; pairs are neighbours (2i, 2i+1) or halves (i, i + d/2)
//   kl_group_stats, kl_group_stats_finish    mean and variance of each group of channels over all pixels
//   kl_group_norm    y = (x - mean) / sqrt(var + eps) * weight + bias, then silu if asked
//
// Bound: HBM. Rows of up to kRowLimit values are read once and kept in registers; sums are f32, deviations are taken from the
// mean in a second pass over the registers. Group sums are taken relative to one value of the group, which keeps them exact
// where the mean is far from zero, and partial sums are added in a fixed order.
#include "common.cuh"

// ---------------------------------------------------------------------------------------------------------------- rows

constexpr int kRowThreads = KL_NORM_THREADS;
constexpr int kRowVectors = 4;  // per thread
constexpr uint32_t kRowLimit = kRowThreads * kRowVectors * kVector;

// One row of x: in registers where it fits, read again from the caches where it does not.
template <class X>
struct Row {
  const X* x;
  uint32_t cols;
  bool vectors;
  float held[kRowVectors][kVector];

  __device__ Row(const KlMat& m, uint64_t row, bool aligned) : x(row_of<const X>(m, row)), cols(m.cols) {
    vectors = aligned && cols <= kRowLimit;
    if (vectors) {
#pragma unroll
      for (int i = 0; i < kRowVectors; i++) {
        const uint32_t col = (i * kRowThreads + threadIdx.x) * kVector;
        if (col < cols) load_vector(x + col, held[i]);
      }
    }
  }

  // The thread's share of a sum of f(value).
  template <class F>
  __device__ float sum(F f) const {
    float total = 0.0f;
    if (vectors) {
#pragma unroll
      for (int i = 0; i < kRowVectors; i++) {
        if ((i * kRowThreads + threadIdx.x) * kVector < cols) {
#pragma unroll
          for (int j = 0; j < kVector; j++) total += f(held[i][j]);
        }
      }
    } else {
      for (uint32_t col = threadIdx.x; col < cols; col += kRowThreads) total += f(to_float(x[col]));
    }
    return total;
  }

  // Stores what `vector` makes of the values it is given with their first column where the row is held, and what `single` makes
  // of one value elsewhere.
  template <class Out, class V, class S>
  __device__ void store(const KlMat& out, uint64_t row, V vector, S single) {
    Out* to = row_of<Out>(out, row);
    if (vectors) {
#pragma unroll
      for (int i = 0; i < kRowVectors; i++) {
        const uint32_t col = (i * kRowThreads + threadIdx.x) * kVector;
        if (col < cols) {
          vector(col, held[i]);
          store_vector(to + col, held[i]);
        }
      }
    } else {
      for (uint32_t col = threadIdx.x; col < cols; col += kRowThreads) to[col] = from_float<Out>(single(col, to_float(x[col])));
    }
  }
};

KL_ENTRY(kl_rms_norm, KlRmsNorm, KL_NORM_THREADS) {
  __shared__ float memory[2][kRowThreads / 32];
  BlockSum<kRowThreads> block_sum(memory);
  const uint64_t r = blockIdx.x;
  const bool aligned = vectors_fit(p.x) && vectors_fit(p.out) && vectors_fit(p.weight);
  const float* weight = row_of<const float>(p.weight, 0);
  with_type(p.out.dtype, [&](auto o) {
    with_type(p.x.dtype, [&](auto i) {
      using Out = typename decltype(o)::type;
      Row<typename decltype(i)::type> row(p.x, r, aligned);
      const float squares = block_sum(row.sum([](float v) { return v * v; }));
      const float scale = rsqrtf(squares / static_cast<float>(p.x.cols) + p.eps);
      row.template store<Out>(
          p.out, r,
          [&](uint32_t col, float(&v)[kVector]) {
            float w[kVector];
            load_vector(weight + col, w);
#pragma unroll
            for (int j = 0; j < kVector; j++) v[j] = v[j] * scale * w[j];
          },
          [&](uint32_t col, float v) { return v * scale * weight[col]; });
    });
  });
}

KL_ENTRY(kl_layer_norm, KlLayerNorm, KL_NORM_THREADS) {
  __shared__ float memory[2][kRowThreads / 32];
  BlockSum<kRowThreads> block_sum(memory);
  const bool second = blockIdx.x >= p.stream[0].x.rows;
  const KlModulated& s = p.stream[second];
  const uint64_t r = second ? blockIdx.x - p.stream[0].x.rows : blockIdx.x;
  const bool aligned = vectors_fit(s.x) && vectors_fit(s.out) && vectors_fit(s.shift) && vectors_fit(s.scale);
  with_type(s.out.dtype, [&](auto o) {
    with_type(s.x.dtype, [&](auto i) {
      with_type(s.shift.dtype, [&](auto m) {
        using Out = typename decltype(o)::type;
        using M = typename decltype(m)::type;
        const M *shift = row_of<const M>(s.shift, 0), *scale = row_of<const M>(s.scale, 0);
        Row<typename decltype(i)::type> row(s.x, r, aligned);
        const float n = static_cast<float>(s.x.cols);
        const float mean = block_sum(row.sum([](float v) { return v; })) / n;
        const float var = block_sum(row.sum([&](float v) { return (v - mean) * (v - mean); })) / n;
        const float rstd = rsqrtf(var + p.eps);
        row.template store<Out>(
            s.out, r,
            [&](uint32_t col, float(&v)[kVector]) {
              float a[kVector], b[kVector];
              load_vector(scale + col, a);
              load_vector(shift + col, b);
#pragma unroll
              for (int j = 0; j < kVector; j++) v[j] = (1.0f + a[j]) * ((v[j] - mean) * rstd) + b[j];
            },
            [&](uint32_t col, float v) {
              return (1.0f + to_float(scale[col])) * ((v - mean) * rstd) + to_float(shift[col]);
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

template <class X, int kWidth>
__device__ __forceinline__ void load_run(const X* from, float (&v)[kWidth]) {
  if constexpr (kWidth == kVector) {
    load_vector(from, v);
  } else {
    v[0] = to_float(*from);
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
#pragma unroll
      for (int j = 0; j < kWidth; j++) shift[j] = to_float(first[(run * kWidth + j) / width * width]);
      const uint64_t step = static_cast<uint64_t>(gridDim.x) * walk.pixels;
#pragma unroll 4
      for (uint64_t pixel = blockIdx.x * walk.pixels + walk.thread_pixel; pixel < p.x.rows; pixel += step) {
        float v[kWidth];
        load_run<X, kWidth>(row_of<const X>(p.x, pixel) + run * kWidth, v);
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
          const float delta = v[j] - shift[j];
          sum[j] += delta;
          squares[j] += delta * delta;
        }
      }
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

// One warp a group: lanes add every 32nd block's share, then each other's, always in the same order.
KL_ENTRY(kl_group_stats_finish, KlGroupStats, 32) {
  const double2* partials = reinterpret_cast<const double2*>(p.partials);
  const uint32_t group = blockIdx.x, width = p.x.cols / p.groups;
  double sum = 0.0, squares = 0.0;
  for (uint64_t block = threadIdx.x; block < p.blocks; block += 32) {
    const double2 s = partials[block * p.groups + group];
    sum += s.x;
    squares += s.y;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  }
  if (threadIdx.x == 0) {
    const double n = static_cast<double>(p.x.rows) * width, delta = sum / n;
    float* stats = row_of<float>(p.stats, group);
    stats[0] = static_cast<float>(load_any(p.x, 0, static_cast<uint64_t>(group) * width) + delta);
    stats[1] = static_cast<float>(fmax(squares / n - delta * delta, 0.0));
  }
}

template <class Out, class X, int kWidth>
__device__ __forceinline__ void normalise_groups(const KlGroupNorm& p) {
  const Walk<kWidth> walk(p.x.cols);
  const uint32_t width = p.x.cols / p.groups;
  const float *weight = row_of<const float>(p.weight, 0), *bias = row_of<const float>(p.bias, 0);
  walk.channels([&](uint32_t channel) {
    float mean[kWidth], scale[kWidth], shift[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; j++) {
      const float* stats = row_of<const float>(p.stats, (channel + j) / width);
      mean[j] = stats[0];
      scale[j] = weight[channel + j] * rsqrtf(stats[1] + p.eps);
      shift[j] = bias[channel + j];
    }
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * walk.pixels;
#pragma unroll 2
    for (uint64_t pixel = blockIdx.x * walk.pixels + walk.thread_pixel; pixel < p.x.rows; pixel += step) {
      float v[kWidth];
      load_run<X, kWidth>(row_of<const X>(p.x, pixel) + channel, v);
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        v[j] = (v[j] - mean[j]) * scale[j] + shift[j];
        if (p.silu) v[j] = silu(v[j]);
      }
      Out* to = row_of<Out>(p.out, pixel) + channel;
      if constexpr (kWidth == kVector) {
        store_vector(to, v);
      } else {
        *to = from_float<Out>(v[0]);
      }
    }
  });
}

KL_ENTRY(kl_group_norm, KlGroupNorm, KL_GROUP_THREADS) {
  with_type(p.out.dtype, [&](auto o) {
    with_type(p.x.dtype, [&](auto t) {
      using Out = typename decltype(o)::type;
      using X = typename decltype(t)::type;
      if (vectors_fit(p.x) && vectors_fit(p.out)) {
        normalise_groups<Out, X, kVector>(p);
      } else {
        normalise_groups<Out, X, 1>(p);
      }
    });
  });
}
