// One naive kernel per matrix op: for f32 and for operands that the tensor-core kernels do not take, and the reference on the device at
// sizes that are too slow on the host.
//
//   kl_naive_gemm        out = epilogue(x w^T + bias)      x [m, k], w [n, k], out [m, n]
//                        store | silu(gate) * up, with n gate rows and n up rows of types of their own | out += gate * (...)
//                        may have a LoRA branch, whose first product another kernel has computed;
//                        inputs, weights and results may be e4m3, and rows of the weight have scales; all three may be NVFP4
//   kl_naive_conv        3x3 convolution over an NHWC image, + bias, + residual; the input may be upsampled by two (nearest neighbor)
//                        first, in phase form, or the stride may be two with zero padding at the right and bottom edge only
//   kl_naive_norm_conv   group norm, SiLU and a 3x3 convolution of the same size, + bias
//   kl_naive_attention   softmax(q k^T * scale) v, several KV segments, grouped-query attention, optional causal mask
//
// Bound: f32 FMA on CUDA cores. GEMM and convolution use 64x64 tiles in shared memory, 16 of K at a time, with a 4x4 patch per thread.
// There is no split-K and no reordering: every result is one sum in the order of K.
#include <attention/softmax.cuh>
#include <conv/geometry.cuh>
#include <common/math.cuh>
#include <common/nvfp4.cuh>
#include <common/reduce.cuh>
#include <common/types.cuh>
#include <ptx/entry.cuh>

using namespace kl::attention;
using namespace kl::conv;

constexpr int kTile = KL_NAIVE_TILE, kBlockK = 16, kPatch = 4;
static_assert(kTile * kTile == static_cast<int>(KL_NAIVE_THREADS) * kPatch * kPatch, "a thread has a 4x4 patch of the tile");

using SmemTile = float[kBlockK][kTile + 1];

// The position of a thread's patch in the output. Rows are along x, the only grid dimension large enough for an image's pixels.
__device__ __forceinline__ uint64_t patch_row(int r) {
  return static_cast<uint64_t>(blockIdx.x) * kTile + threadIdx.x / (kTile / kPatch) * kPatch + r;
}
__device__ __forceinline__ uint32_t patch_col(int c) { return blockIdx.y * kTile + threadIdx.x % (kTile / kPatch) + c * (kTile / kPatch); }

template <int kGemms>
using Patch = float[kPatch][kPatch][kGemms];

// Calls f(row, col, accumulators, whether (row, col) is inside the output). Sixteen consecutive lanes have consecutive columns.
template <int kGemms, class F>
__device__ __forceinline__ void for_each_place(Patch<kGemms>& acc, uint64_t rows, uint32_t cols, F f) {
#pragma unroll
  for (int r = 0; r < kPatch; r++) {
#pragma unroll
    for (int c = 0; c < kPatch; c++) {
      const uint64_t row = patch_row(r);
      const uint32_t col = patch_col(c);
      f(row, col, acc[r][c], row < rows && col < cols);
    }
  }
}

// Accumulates over K for one output tile. a(row, i) and b(j, col, i) return the operands of the j-th of kGemms GEMMs that share A. A
// thread has kInFlight elements of each operand in flight.
template <int kInFlight = 1, int kGemms, class A, class B>
__device__ __forceinline__ void tile_gemm(SmemTile& a_tile, SmemTile (&b_tile)[kGemms], Patch<kGemms>& acc, uint64_t rows, uint32_t cols,
                                          uint32_t k_size, A a, B b) {
  const uint64_t row0 = static_cast<uint64_t>(blockIdx.x) * kTile;
  const uint32_t col0 = blockIdx.y * kTile;
  const uint32_t ty = threadIdx.x / (kTile / kPatch), tx = threadIdx.x % (kTile / kPatch);
  for (uint32_t i0 = 0; i0 < k_size; i0 += kBlockK) {
#pragma unroll kInFlight
    for (uint32_t e = threadIdx.x; e < kTile * kBlockK; e += KL_NAIVE_THREADS) {
      const uint32_t line = e / kBlockK, i = e % kBlockK;
      a_tile[i][line] = row0 + line < rows && i0 + i < k_size ? a(row0 + line, i0 + i) : 0.0f;
#pragma unroll
      for (int j = 0; j < kGemms; j++) {
        b_tile[j][i][line] = col0 + line < cols && i0 + i < k_size ? b(j, col0 + line, i0 + i) : 0.0f;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlockK; i++) {
      float x[kPatch];
#pragma unroll
      for (int r = 0; r < kPatch; r++) x[r] = a_tile[i][ty * kPatch + r];
#pragma unroll
      for (int j = 0; j < kGemms; j++) {
#pragma unroll
        for (int c = 0; c < kPatch; c++) {
          const float w = b_tile[j][i][tx + c * (kTile / kPatch)];
#pragma unroll
          for (int r = 0; r < kPatch; r++) acc[r][c][j] += x[r] * w;
        }
      }
    }
    __syncthreads();
  }
}

KL_ENTRY(kl_naive_gemm, KlNaiveGemm, KL_NAIVE_THREADS, 3) {
  KL_SHARED(SmemTile, a_tile, );
  KL_SHARED(SmemTile, one, [1]);
  KL_SHARED(SmemTile, both, [2]);
  const auto multiply = [&](auto t, auto u) {
    using X = typename decltype(t)::type;
    using W = typename decltype(u)::type;
    constexpr bool kCodes = std::is_same_v<W, Any>;
    const auto x = [&](uint64_t row, uint32_t i) {
      if constexpr (kCodes) {
        if (p.x.dtype == KL_E2M1) return load_nvfp4(p.x, row, i);
      }
      return load<X>(p.x, row, i);
    };
    const auto w = [&](int j, uint32_t col, uint32_t i) {
      const uint32_t row = p.first[j] + col;
      if constexpr (kCodes) {
        if (p.w[j].dtype == KL_E2M1) return load_nvfp4(p.w[j], row, i);
      }
      return load<W>(p.w[j], row, i);
    };
    const auto scale = [&](int j, uint32_t col) {
      const bool by_rows = kCodes && p.w[j].scales && p.w[j].dtype != KL_E2M1;
      return by_rows ? reinterpret_cast<const float*>(p.w[j].scales)[p.first[j] + col] : 1.0f;
    };
    // The weight's product in units of the result, and the second product of a LoRA branch, whose K is the rank.
    const uint32_t m = p.out.rows, n = p.out.cols;
    const auto accumulate = [&](auto& b_tile, auto& acc) {
      constexpr int kGemms = std::extent_v<std::remove_reference_t<decltype(b_tile)>>;
      // Finding an element of any type takes registers.
      tile_gemm<kCodes ? 1 : kTile * kBlockK / KL_NAIVE_THREADS>(a_tile, b_tile, acc, m, n, p.x.cols, x, w);
      for_each_place<kGemms>(acc, m, n, [&](uint64_t, uint32_t col, float(&sum)[kGemms], bool inside) {
#pragma unroll
        for (int j = 0; j < kGemms; j++) sum[j] *= inside ? scale(j, col) : 1.0f;
      });
      const auto down_out = [&](uint64_t row, uint32_t i) { return load_any(p.down_out, row, i); };
      const auto up = [&](int j, uint32_t col, uint32_t i) { return load_any(p.up[j], col, i); };
      tile_gemm(a_tile, b_tile, acc, m, n, p.down_out.cols, down_out, up);
    };
    if (p.epilogue == KL_SWIGLU) {
      Patch<2> acc = {};
      accumulate(both, acc);
      for_each_place<2>(acc, m, n, [&](uint64_t row, uint32_t col, const float(&sum)[2], bool inside) {
        const float v = inside ? silu(sum[0]) * sum[1] : 0.0f;
        if constexpr (kCodes) {
          store_of_lanes(p.out, row, col, v, inside, p.saturated);
        } else if (inside) {
          store_quantized(p.out, row, col, v, p.saturated);
        }
      });
    } else {
      Patch<1> acc = {};
      accumulate(one, acc);
      for_each_place<1>(acc, m, n, [&](uint64_t row, uint32_t col, const float(&sum)[1], bool inside) {
        if (!inside) return;
        float v = sum[0] + (p.bias.data ? load<float>(p.bias, 0, col) : 0.0f);
        if (p.epilogue == KL_GATE_RESIDUAL) {
          v = load_any(p.out, row, col) + (p.gate.data ? load_any(p.gate, 0, col) : 1.0f) * v;
        }
        store_quantized(p.out, row, col, v, p.saturated);
      });
    }
  };
  // Codes are few enough bytes to be read value by value, and so are gate and up rows of different types. Storing e2m1 takes the registers
  // of loads in flight.
  const auto is_code = [](const KlMat& m) { return m.dtype == KL_E4M3 || m.dtype == KL_E2M1; };
  const bool codes = is_code(p.x) || is_code(p.w[0]) || p.out.dtype == KL_E2M1;
  if (codes || p.w[0].dtype != p.w[1].dtype) {
    multiply(Type<Any>(), Type<Any>());
  } else {
    with_operand_types(p.x.dtype, p.w[0].dtype, multiply);
  }
}

KL_ENTRY(kl_naive_conv, KlConv, KL_NAIVE_THREADS) {
  KL_SHARED(SmemTile, a_tile, );
  KL_SHARED(SmemTile, b_tile, [1]);
  with_operand_types(p.x.dtype, p.w.dtype, [&](auto t, auto u) {
    using X = typename decltype(t)::type;
    using W = typename decltype(u)::type;
    // A CTA computes pixels of one phase.
    const uint32_t channels = p.x.cols, width = conv_phase_width(p), phase = blockIdx.z, k = conv_taps(p.sampling) * channels;
    const auto x = [&](uint64_t pixel, uint32_t i) {
      const uint32_t tap = i / channels;
      const int32_t sy = conv_source(p.sampling, pixel / width, phase / 2, conv_tap_row(p.sampling, tap));
      const int32_t sx = conv_source(p.sampling, pixel % width, phase % 2, conv_tap_col(p.sampling, tap));
      if (sy < 0 || sy >= static_cast<int32_t>(p.height) || sx < 0 || sx >= static_cast<int32_t>(p.width)) return 0.0f;
      const uint64_t from = static_cast<uint64_t>(sy) * p.width + sx;
      return load<X>(p.x, from, i % channels);
    };
    const auto w = [&](int, uint32_t col, uint32_t i) { return load<W>(p.w, col, phase * k + i); };
    const uint32_t m = p.out.rows / conv_phases(p.sampling), n = p.out.cols;
    Patch<1> acc = {};
    tile_gemm(a_tile, b_tile, acc, m, n, k, x, w);
    for_each_place<1>(acc, m, n, [&](uint64_t pixel, uint32_t col, const float(&sum)[1], bool inside) {
      if (!inside) return;
      const uint64_t row = conv_out_row(p, pixel, phase);
      float v = sum[0] + load<float>(p.bias, 0, col);
      if (p.residual.data) v += load_any(p.residual, row, col);
      store_any(p.out, row, col, v);
    });
  });
}

KL_ENTRY(kl_naive_norm_conv, KlNormConv, KL_NAIVE_THREADS) {
  KL_SHARED(SmemTile, a_tile, );
  KL_SHARED(SmemTile, b_tile, [1]);
  with_operand_types(p.x.dtype, p.w.dtype, [&](auto t, auto u) {
    using X = typename decltype(t)::type;
    using W = typename decltype(u)::type;
    const uint32_t channels = p.x.cols, group_width = channels / p.stats.rows;
    const auto x = [&](uint64_t pixel, uint32_t i) {
      const uint32_t tap = i / channels, channel = i % channels, group = channel / group_width;
      const int32_t sy = conv_source(KL_SAME, pixel / p.width, 0, tap / 3), sx = conv_source(KL_SAME, pixel % p.width, 0, tap % 3);
      // Padding applies to the normalized image.
      if (sy < 0 || sy >= static_cast<int32_t>(p.height) || sx < 0 || sx >= static_cast<int32_t>(p.width)) return 0.0f;
      const float v = load<X>(p.x, static_cast<uint64_t>(sy) * p.width + sx, channel);
      const float scale = load<float>(p.gain, 0, channel) * rsqrtf(load<float>(p.stats, group, 1) + p.eps);
      return silu((v - load<float>(p.stats, group, 0)) * scale + load<float>(p.shift, 0, channel));
    };
    const auto w = [&](int, uint32_t col, uint32_t i) { return load<W>(p.w, col, i); };
    Patch<1> acc = {};
    tile_gemm(a_tile, b_tile, acc, p.out.rows, p.out.cols, 9 * channels, x, w);
    for_each_place<1>(acc, p.out.rows, p.out.cols, [&](uint64_t row, uint32_t col, const float(&sum)[1], bool inside) {
      if (inside) store_any(p.out, row, col, sum[0] + load<float>(p.bias, 0, col));
    });
  });
}

// One warp per query and head, with online softmax one key at a time. A lane holds every 32nd element of the head. QK is the type of
// queries and keys, V the type of values.
template <class QK, class V>
__device__ __forceinline__ void attention_row(const KlAttention& p, uint64_t query, uint32_t head) {
  constexpr int kHeld = KL_HEAD_DIM / 32;
  const uint32_t lane = threadIdx.x % 32, d = p.head_dim;
  const uint64_t q_col = static_cast<uint64_t>(head) * d, kv_col = static_cast<uint64_t>(head / p.group) * d;
  float q[kHeld], out[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const uint32_t e = i * 32 + lane;
    q[i] = e < d ? load<QK>(p.q, query, q_col + e) * p.q.scale * p.scale : 0.0f;
    out[i] = 0.0f;
  }
  float row_max = -INFINITY, row_sum = 0.0f;
  for (uint32_t s = 0; s < p.segments; s++) {
    const KlMat &k = p.kv[s].k, &v = p.kv[s].v;
    const uint64_t keys = p.causal ? min(static_cast<uint64_t>(k.rows), query + 1) : k.rows;
    for (uint64_t key = 0; key < keys; key++) {
      const QK* k_row = row_of<const QK>(k, key) + kv_col;
      const V* v_row = row_of<const V>(v, key) + kv_col;
      float score = 0.0f;
#pragma unroll
      for (int i = 0; i < kHeld; i++) {
        if (i * 32 + lane < d) score += q[i] * to_float(k_row[i * 32 + lane]);
      }
      float prob[1] = {warp_sum(score) * k.scale};
      const auto at = [&](int i) -> float& { return prob[i]; };
      const float correction = online_softmax<1>(row_max, row_sum, fmaxf(row_max, prob[0]), NaturalExp{}, at);
#pragma unroll
      for (int i = 0; i < kHeld; i++) {
        if (i * 32 + lane < d) out[i] = out[i] * correction + prob[0] * to_float(v_row[i * 32 + lane]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const uint32_t e = i * 32 + lane;
    store_of_lanes(p.out, query, q_col + e, out[i] / row_sum, e < d, p.saturated);
  }
}

KL_ENTRY(kl_naive_attention, KlAttention, KL_ATTENTION_WARPS * 32) {
  const uint64_t query = static_cast<uint64_t>(blockIdx.x) * KL_ATTENTION_WARPS + threadIdx.x / 32;
  if (query >= p.q.rows) return;
  with_type(p.kv[0].v.dtype, [&](auto t) {
    using V = typename decltype(t)::type;
    if (p.q.dtype == KL_E4M3) {
      attention_row<e4m3, V>(p, query, blockIdx.y);
    } else {
      attention_row<V, V>(p, query, blockIdx.y);
    }
  });
}
