// Memory-bound element-wise kernels: each value is read once, transformed, and written once. Only kl_count_non_finite has a reduction.
//
//   kl_map                out = f(x), f being copy or SiLU; may change the dtype
//   kl_patchify           tokens[t, 4 c + p] = (pixels[4 t's pixel p, c] - mean) / sqrt(var + eps), 2x2 pixels to a token
//   kl_unpatchify         its inverse
//   kl_euler              latents += dt * velocity, in f32
//   kl_renoise            latents = (1 - sigma) init + sigma noise, in f32, in the rows to keep
//   kl_guidance           out = uncond + scale * (cond - uncond), classifier-free guidance
//   kl_blend              into = (1 - t) from + t into, t rising from row to row or from pixel to pixel, over the overlap of two tiles
//   kl_preview            8-bit colors of latents: as kl_pixels, of the sum of channel * table row, plus the table's last row
//   kl_pixels             8-bit values of an image in -1..1: round((x / 2 + 1/2) * 255), half to even, as the reference does
//   kl_count_non_finite   the number of values of a matrix that are not finite, as f32
//
// Bound: HBM for the large ones; kernels on latents (1 to 2 MB at 1024 x 1024) are bound by launch latency.
// A thread takes kVector consecutive values of a row where every matrix allows 16-byte accesses, one value elsewhere. kl_count_non_finite tests
// exponent bits with several loads in flight, and is a single launch, because a second would take as long as a small matrix.
#include <common/math.cuh>
#include <common/reduce.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <ptx/entry.cuh>

constexpr uint64_t kThreads = KL_POINTWISE_THREADS;

// Grid-stride loop: calls f(row, col) for every run of `width` columns, with rows along the grid's y and columns along its x. The host
// passes matrices without gaps as one long row.
template <class F>
__device__ __forceinline__ void for_each_run(const KlMat& m, uint32_t width, F f) {
  for (uint64_t row = blockIdx.y; row < m.rows; row += gridDim.y) {
    for (uint64_t col = (blockIdx.x * kThreads + threadIdx.x) * width; col < m.cols; col += gridDim.x * kThreads * width) {
      f(row, col);
    }
  }
}

template <class Out, class X, class F>
__device__ __forceinline__ void map_one(const KlMat& out, const KlMat& x, F f) {
  if (vectors_fit(out) && vectors_fit(x)) {
    for_each_run(out, kVector, [&](uint64_t row, uint64_t col) {
      float v[kVector];
      load_vector(row_of<const X>(x, row) + col, v);
#pragma unroll
      for (int i = 0; i < kVector; i++) v[i] = f(v[i]);
      store_vector(row_of<Out>(out, row) + col, v);
    });
  } else {
    for_each_run(out, 1, [&](uint64_t row, uint64_t col) {
      row_of<Out>(out, row)[col] = from_float<Out>(f(load<X>(x, row, col)));
    });
  }
}

template <class F>
__device__ __forceinline__ void map_types(const KlMat& out, const KlMat& x, F f) {
  with_type(out.dtype, [&](auto o) {
    with_type(x.dtype, [&](auto i) { map_one<typename decltype(o)::type, typename decltype(i)::type>(out, x, f); });
  });
}

KL_ENTRY(kl_map, KlMap, KL_POINTWISE_THREADS) {
  if (p.function == KL_SILU) {
    map_types(p.out, p.x, [](float v) { return silu(v); });
  } else {
    map_types(p.out, p.x, [](float v) { return v; });
  }
}

// The pixel and channel of value (row, col) of the tokens.
struct PatchPlace {
  uint64_t pixel, channel;
  __device__ PatchPlace(uint64_t width, uint64_t row, uint64_t col) {
    const uint64_t y = row / width, x = row % width, corner = col % 4;
    pixel = (2 * y + corner / 2) * 2 * width + 2 * x + corner % 2;
    channel = col / 4;
  }
};

KL_ENTRY(kl_patchify, KlPatch, KL_POINTWISE_THREADS) {
  for_each_run(p.tokens, 1, [&](uint64_t row, uint64_t col) {
    const PatchPlace at(p.width, row, col);
    const float deviation = sqrtf(load<float>(p.var, 0, col) + p.eps);
    store_any(p.tokens, row, col, (load_any(p.pixels, at.pixel, at.channel) - load<float>(p.mean, 0, col)) / deviation);
  });
}

KL_ENTRY(kl_unpatchify, KlPatch, KL_POINTWISE_THREADS) {
  for_each_run(p.tokens, 1, [&](uint64_t row, uint64_t col) {
    const PatchPlace at(p.width, row, col);
    const float deviation = sqrtf(load<float>(p.var, 0, col) + p.eps);
    store_any(p.pixels, at.pixel, at.channel, load_any(p.tokens, row, col) * deviation + load<float>(p.mean, 0, col));
  });
}

// Rounds the product and the sum separately, without FMA, like the CPU backend.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return __fadd_rn(c, __fmul_rn(a, b)); }

template <class V>
__device__ __forceinline__ void euler(const KlEuler& p) {
  if (vectors_fit(p.latents) && vectors_fit(p.velocity)) {
    for_each_run(p.latents, kVector, [&](uint64_t row, uint64_t col) {
      float x[kVector], v[kVector];
      load_vector(row_of<float>(p.latents, row) + col, x);
      load_vector(row_of<const V>(p.velocity, row) + col, v);
#pragma unroll
      for (int i = 0; i < kVector; i++) x[i] = multiply_add(p.dt, v[i], x[i]);
      store_vector(row_of<float>(p.latents, row) + col, x);
    });
  } else {
    for_each_run(p.latents, 1, [&](uint64_t row, uint64_t col) {
      float* at = row_of<float>(p.latents, row) + col;
      *at = multiply_add(p.dt, load<V>(p.velocity, row, col), *at);
    });
  }
}

KL_ENTRY(kl_euler, KlEuler, KL_POINTWISE_THREADS) {
  with_type(p.velocity.dtype, [&](auto t) { euler<typename decltype(t)::type>(p); });
}

// Products and sum are rounded one by one, as on the CPU.
template <class X>
__device__ __forceinline__ void renoise(const KlRenoise& p) {
  const float rest = 1.0f - p.sigma;
  const auto stays = [&](uint64_t row, uint64_t col) {
    return p.keep.data != 0 && load<float>(p.keep, row + col / p.cols, 0) == 0.0f;
  };
  // A vector never has values of two rows.
  if (p.cols % kVector == 0 && vectors_fit(p.latents) && vectors_fit(p.init) && vectors_fit(p.noise)) {
    for_each_run(p.latents, kVector, [&](uint64_t row, uint64_t col) {
      if (stays(row, col)) return;
      float x[kVector], z[kVector];
      load_vector(row_of<const X>(p.init, row) + col, x);
      load_vector(row_of<const float>(p.noise, row) + col, z);
#pragma unroll
      for (int i = 0; i < kVector; i++) x[i] = multiply_add(p.sigma, z[i], __fmul_rn(rest, x[i]));
      store_vector(row_of<float>(p.latents, row) + col, x);
    });
  } else {
    for_each_run(p.latents, 1, [&](uint64_t row, uint64_t col) {
      if (stays(row, col)) return;
      const float old = __fmul_rn(rest, load<X>(p.init, row, col));
      row_of<float>(p.latents, row)[col] = multiply_add(p.sigma, load<float>(p.noise, row, col), old);
    });
  }
}

KL_ENTRY(kl_renoise, KlRenoise, KL_POINTWISE_THREADS) {
  with_type(p.init.dtype, [&](auto t) { renoise<typename decltype(t)::type>(p); });
}

template <class Out, class X>
__device__ __forceinline__ void guidance(const KlGuidance& p) {
  if (vectors_fit(p.out) && vectors_fit(p.cond) && vectors_fit(p.uncond)) {
    for_each_run(p.out, kVector, [&](uint64_t row, uint64_t col) {
      float c[kVector], u[kVector];
      load_vector(row_of<const X>(p.cond, row) + col, c);
      load_vector(row_of<const X>(p.uncond, row) + col, u);
#pragma unroll
      for (int i = 0; i < kVector; i++) c[i] = multiply_add(p.scale, c[i] - u[i], u[i]);
      store_vector(row_of<Out>(p.out, row) + col, c);
    });
  } else {
    for_each_run(p.out, 1, [&](uint64_t row, uint64_t col) {
      const float c = load<X>(p.cond, row, col), u = load<X>(p.uncond, row, col);
      row_of<Out>(p.out, row)[col] = from_float<Out>(multiply_add(p.scale, c - u, u));
    });
  }
}

KL_ENTRY(kl_guidance, KlGuidance, KL_POINTWISE_THREADS) {
  with_type(p.out.dtype, [&](auto o) {
    with_type(p.cond.dtype, [&](auto x) { guidance<typename decltype(o)::type, typename decltype(x)::type>(p); });
  });
}

// Products and sum are rounded one by one, as on the CPU.
KL_ENTRY(kl_blend, KlBlend, KL_POINTWISE_THREADS) {
  for_each_run(p.into, 1, [&](uint64_t row, uint64_t col) {
    const uint64_t step = p.channels == 0 ? row : col / p.channels;
    const float weight = static_cast<float>(step) / static_cast<float>(p.steps);
    const float old = __fmul_rn(1.0f - weight, load_any(p.from, row, col));
    store_any(p.into, row, col, multiply_add(weight, load_any(p.into, row, col), old));
  });
}

__device__ __forceinline__ uint32_t to_byte(float v) {
  return static_cast<uint32_t>(__float2int_rn(255.0f * __saturatef(__fadd_rn(__fmul_rn(0.5f, v), 0.5f))));
}

// Threads take pixels in the order of tokens: four of them read neighboring values. Products and sums are rounded one by one, as on the CPU.
KL_ENTRY(kl_preview, KlPreview, KL_POINTWISE_THREADS) {
  const uint64_t channels = p.latents.cols / 4, pixels = 4 * static_cast<uint64_t>(p.latents.rows);
  for (uint64_t i = blockIdx.x * kThreads + threadIdx.x; i < pixels; i += gridDim.x * kThreads) {
    const uint64_t token = i / 4, corner = i % 4;
    float color[3];
#pragma unroll
    for (int k = 0; k < 3; k++) color[k] = load<float>(p.table, channels, k);
#pragma unroll 4
    for (uint64_t c = 0; c < channels; c++) {
      const float value = load<float>(p.latents, token, 4 * c + corner);
#pragma unroll
      for (int k = 0; k < 3; k++) color[k] = multiply_add(load<float>(p.table, c, k), value, color[k]);
    }
    uint8_t* to = row_of<uint8_t>(p.out, PatchPlace(p.width, token, corner).pixel);
#pragma unroll
    for (int k = 0; k < 3; k++) to[k] = static_cast<uint8_t>(to_byte(color[k]));
  }
}

KL_ENTRY(kl_pixels, KlPixels, KL_POINTWISE_THREADS) {
  if (vectors_fit(p.x) && p.x.dtype == KL_F32 && p.out.data % 4 == 0 && p.out.rows == 1) {
    for_each_run(p.out, 4, [&](uint64_t row, uint64_t col) {
      const float4 v = *reinterpret_cast<const float4*>(row_of<const float>(p.x, row) + col);
      const uint32_t bytes = to_byte(v.x) | to_byte(v.y) << 8 | to_byte(v.z) << 16 | to_byte(v.w) << 24;
      *reinterpret_cast<uint32_t*>(row_of<uint8_t>(p.out, row) + col) = bytes;
    });
  } else {
    for_each_run(p.out, 1, [&](uint64_t row, uint64_t col) {
      row_of<uint8_t>(p.out, row)[col] = static_cast<uint8_t>(to_byte(load_any(p.x, row, col)));
    });
  }
}

// Reads a matrix of one row that allows vector accesses, in batches: calls f with the words of each batch, zeros past the end.
template <class X, class F>
__device__ __forceinline__ void for_each_batch(const KlMat& x, F f) {
  constexpr int kBatch = KL_REDUCTION_BATCH;
  const uint4* from = row_of<const uint4>(x, 0);
  const uint64_t vectors = x.cols * sizeof(X) / sizeof(uint4), step = gridDim.x * kThreads;
  for (uint64_t at = blockIdx.x * kThreads + threadIdx.x; at < vectors; at += kBatch * step) {
    uint4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) v[i] = at + i * step < vectors ? __ldcs(from + at + i * step) : make_uint4(0, 0, 0, 0);
    f(v);
  }
}

// Sets bit 31 of a float, or bits 15 and 31 of a pair of bf16, where the exponent is all ones: infinity or NaN.
template <class X>
__device__ __forceinline__ uint32_t not_finite(uint32_t word) {
  if constexpr (sizeof(X) == sizeof(bf16)) return ((word & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
  return ((word & 0x7f800000u) + 0x00800000u) & 0x80000000u;
}

template <class X>
__device__ __forceinline__ uint32_t count_in(const KlMat& x) {
  uint32_t found = 0;
  if (x.rows != 1 || !vectors_fit(x)) {
    for_each_run(x, 1, [&](uint64_t row, uint64_t col) { found += !isfinite(load<X>(x, row, col)); });
    return found;
  }
  for_each_batch<X>(x, [&](const auto& batch) {
    uint32_t any = 0;
#pragma unroll
    for (const uint4& v : batch) any |= not_finite<X>(v.x) | not_finite<X>(v.y) | not_finite<X>(v.z) | not_finite<X>(v.w);
    if (any == 0) return;
#pragma unroll
    for (const uint4& v : batch) {
      found += __popc(not_finite<X>(v.x)) + __popc(not_finite<X>(v.y)) + __popc(not_finite<X>(v.z)) + __popc(not_finite<X>(v.w));
    }
  });
  return found;
}

// The last CTA to finish writes the sum and resets both counters to zero. Integer atomics give the same sum in any order. A count
// beyond 2^32 wraps to a smaller number, which still reports the error.
KL_ENTRY(kl_count_non_finite, KlCount, KL_POINTWISE_THREADS) {
  uint32_t found = 0;
  with_type(p.x.dtype, [&](auto t) { found = count_in<typename decltype(t)::type>(p.x); });
  uint32_t *done = reinterpret_cast<uint32_t*>(p.words), *total = done + 1;
  if (__syncthreads_or(found != 0)) {  // rare
    found = __reduce_add_sync(0xffffffffu, found);
    if (lane() == 0 && found != 0) {
      atomicAdd(total, found);
      __threadfence();
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const uint32_t others = gridDim.x * gridDim.y - 1;
    __threadfence();
    if (atomicInc(done, others) == others) {
      __threadfence();
      row_of<float>(p.count, 0)[0] = static_cast<float>(atomicExch(total, 0));
    }
  }
}

// The largest magnitude in a word, as a float: magnitudes are in the order of their bits. Each bf16 of a pair is the upper half of its
// float.
template <class X>
__device__ __forceinline__ uint32_t largest_of(uint32_t word) {
  if constexpr (sizeof(X) == sizeof(bf16)) return max(word << 16 & 0x7fff0000u, word & 0x7fff0000u);
  return word & 0x7fffffffu;
}

template <class X>
__device__ __forceinline__ uint32_t largest_in(const KlMat& x) {
  uint32_t largest = 0;
  if (x.rows != 1 || !vectors_fit(x)) {
    for_each_run(x, 1, [&](uint64_t row, uint64_t col) { largest = max(largest, largest_of<float>(__float_as_uint(load<X>(x, row, col)))); });
    return largest;
  }
  for_each_batch<X>(x, [&](const auto& batch) {
#pragma unroll
    for (const uint4& v : batch) {
      largest = max(largest, max(max(largest_of<X>(v.x), largest_of<X>(v.y)), max(largest_of<X>(v.z), largest_of<X>(v.w))));
    }
  });
  return largest;
}

// The maximum does not depend on the order of CTAs.
KL_ENTRY(kl_largest_magnitude, KlLargest, KL_POINTWISE_THREADS) {
  KL_SHARED(uint32_t, warps, [kThreads / 32]);
  uint32_t largest = 0;
  with_type(p.x.dtype, [&](auto t) { largest = largest_in<typename decltype(t)::type>(p.x); });
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane() == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint32_t other : warps) largest = max(largest, other);
    atomicMax(row_of<uint32_t>(p.largest, 0), largest);
  }
}
