// The fused epilogues of the persistent GEMM with TMA: bias, SwiGLU, gate and residual, qk-norm with RoPE; stores by TMA.
#pragma once

#include <common/math.cuh>
#include <common/nvfp4.cuh>
#include <common/reduce.cuh>
#include <common/rope.cuh>
#include <common/swizzle.cuh>
#include <common/vectors.cuh>
#include <gemm/tma_config.cuh>
#include <gemm/tma_policies.cuh>

namespace kl::gemm {
// The fused epilogue, which a warp runs on the accumulators of its rows of a finished tile.
template <class Config>
struct GemmEpilogue {
  const typename Config::Params& p;
  const KlGemmStream& s;
  const KlOutputRange& part;
  const KlTensorMap* out;
  typename Config::Acc& acc;
  uint32_t buffers;  // staging buffers of this warp
  uint32_t thread;
  uint32_t row0, col0;
  typename Config::Store::template Origin<Config> origin;

  using Store = typename Config::Store;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr bool kScaled = Config::Scaling::kScaled;

  __device__ __forceinline__ GemmEpilogue(const typename Config::Params& p, const TileCoord<Config>& at, typename Config::Acc& acc,
                                          const Pipeline<Config>& pipe, uint32_t thread)
      : p(p), s(p.stream[at.stream]), part(s.part[at.part]), out(&p.out[at.stream][at.part]), acc(acc),
        buffers(pipe.store_buffers(thread / 32 - kWarpgroupWarps)), thread(thread), origin(p, at, first_row(thread)) {
    row0 = at.row_tile * Config::kBlockM + first_row(thread);
    col0 = at.col_tile * (part.epilogue == KL_SWIGLU ? kBlockN / 2 : kBlockN);
  }

  // The warp's first row in a tile.
  static __device__ __forceinline__ uint32_t first_row(uint32_t thread) {
    const uint32_t warp = thread / 32 - kWarpgroupWarps;
    return warp / kWarpgroupWarps * (Config::kMmaM * kWgmmaRows) + warp % kWarpgroupWarps * kWarpRows;
  }

  __device__ __forceinline__ uint32_t lane() const { return thread % 32; }

  // The offset of staging buffer i.
  static __device__ __forceinline__ uint32_t buffer_offset(int i) { return i % Config::kStoreBuffers * Config::kStoreBufferBytes; }

  // Stores the first kWidth columns of all rows; f(m, e) returns the value of accumulator e of wgmma tile m.
  template <class Rows, int kWidth, class F>
  __device__ __forceinline__ void store_as(F f) {
    constexpr int kPiece = box_cols<Rows>(kWidth), kAcross = kWidth / kPiece, kCount = Config::kMmaM * kAcross;
    static_assert(KL_TMA_STORE_ROWS * kPiece * sizeof(typename Rows::Element) <= Config::kStoreBufferBytes, "a piece fits a buffer");
#pragma unroll
    for (int first = 0; first < kCount; first += Config::kStoresAtOnce) {
      if (lane() == 0) tma_store_wait<Config::kStoreBuffers - Config::kStoresAtOnce>();
      __syncwarp();
#pragma unroll
      for (int i = first; i < first + Config::kStoresAtOnce && i < kCount; i++) {
        float v[kPiece / 2];
#pragma unroll
        for (int e = 0; e < kPiece / 2; e++) v[e] = f(i / kAcross, i % kAcross * (kPiece / 2) + e);
        Rows::template stage<kPiece>(p, buffers, buffer_offset(i), lane(), v);
      }
      fence_proxy_async();
      __syncwarp();
      if (lane() == 0) {
#pragma unroll
        for (int i = first; i < first + Config::kStoresAtOnce && i < kCount; i++) {
          origin.store(out, buffers + buffer_offset(i), col0 + i % kAcross * kPiece, kWgmmaRows * (i / kAcross));
        }
      }
    }
  }

  // Stores columns as e2m1. A lane has two of every eight columns, which are one byte. The lanes of a quad exchange the bytes of eight
  // fragments: each then has eight bytes of a row, and the row is a whole sector of 32. It is stored directly, with the four scales of its
  // blocks as one word.
  template <int kWidth, class F>
  __device__ __forceinline__ void store_e2m1(F f) {
    static_assert(kWidth % KL_SCALE_TILE_COLS == 0, "a row has whole words of scales");
    constexpr int kFragments = KL_SCALE_TILE_COLS / 8, kBlocks = KL_SCALE_TILE_COLS / 16;
#pragma unroll
    for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t row = row0 + kWgmmaRows * m + lane() / 4 + 8 * half;
#pragma unroll
        for (int first = 0; first < kWidth / 8; first += kFragments) {
          uint32_t bytes[kFragments], scales = 0;
#pragma unroll
          for (int block = 0; block < kBlocks; block++) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = f(m, 4 * (first + 2 * block + i / 2) + 2 * half + i % 2);
            const QuantizedBlock quantized(quad_max_bits(largest_magnitude(v)), part.out.scale);
            scales |= quantized.scale << 8 * block;
#pragma unroll
            for (int i = 0; i < 2; i++) {
              bytes[2 * block + i] = pack_e2m1(v[2 * i] * quantized.inverse, v[2 * i + 1] * quantized.inverse);
            }
          }
          const auto pair = [&](int i) { return bytes[i] | bytes[i + 1] << 8; };
          const uint2 pairs = transpose_quad_halves(pair(0) | pair(2) << 16, pair(4) | pair(6) << 16);
          const uint32_t col = col0 + 8 * first;
          if (row >= part.out.rows || col >= part.out.cols) continue;
          const uint2 codes = make_uint2(permute_bytes<0x6420>(pairs.x, pairs.y), permute_bytes<0x7531>(pairs.x, pairs.y));
          *reinterpret_cast<uint2*>(part.out.data + (row * part.out.stride + col) / 2 + lane() % 4 * 8) = codes;
          const uint32_t at = block_scale_offset(row, col / 16, static_cast<uint32_t>(part.out.stride));
          if (lane() % 4 == 0) *reinterpret_cast<uint32_t*>(part.out.scales + at) = scales;
        }
      }
    }
  }

  // Stores columns in the output's type, if the policies leave a choice.
  template <int kWidth, class F>
  __device__ __forceinline__ void store_all(F f) {
    if constexpr (Store::kStoresE4m3 && kWidth % 32 == 0) {
      if (part.out.dtype == KL_E4M3) return store_as<typename Store::E4m3Rows, kWidth>(f);
    }
    store_as<Store, kWidth>(f);
  }

  // The factor that accumulators still need, for gate columns of SwiGLU or its up columns: the scales of the operands. It is one if a LoRA
  // branch was added, because add_lora has applied the scales.
  __device__ __forceinline__ float alpha(int half = 0) const {
    if constexpr (kScaled) return s.down_out.data ? 1.0f : part.w[half].alpha;
    return 1.0f;
  }

  static __device__ __forceinline__ float times(float v, float alpha) {
    if constexpr (kScaled) return v * alpha;
    return v;
  }

  // Multiplies the accumulators by the weight's row scales, if there are any.
  __device__ __forceinline__ void apply_row_scales() {
    if constexpr (kScaled) {
      const bool paired = part.epilogue == KL_SWIGLU;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const KlGemmRows& rows = part.w[paired ? half : 0];
        const float* scales = reinterpret_cast<const float*>(s.w[rows.matrix].scales);
        if (!scales || rows.dtype == KL_E2M1) continue;
        constexpr int kHalfN = Config::kMmaN / 2;
#pragma unroll
        for (int i = 0; i < kHalfN; i++) {
          const int n = half * kHalfN + i;
          const uint32_t col = col0 + 8 * (paired ? i : n) + lane() % 4 * 2;
          if (col >= part.out.cols) continue;
          const float a = scales[rows.first + col], b = scales[rows.first + col + 1];
#pragma unroll
          for (int m = 0; m < Config::kMmaM; m++) {
            float* v = &acc[m][4 * n];
            v[0] *= a, v[1] *= b, v[2] *= a, v[3] *= b;
          }
        }
      }
    }
  }

  // Scales the product of the operands and adds the LoRA branch, as many columns at a time as come through the pipeline.
  __device__ __forceinline__ void add_lora(Pipeline<Config>& pipe) {
    if constexpr (kScaled) {
      const bool paired = part.epilogue == KL_SWIGLU;
      const float first = part.w[0].alpha, second = part.w[paired ? 1 : 0].alpha;
#pragma unroll
      for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
        for (int e = 0; e < kBlockN / 2; e++) acc[m][e] *= e < kBlockN / 4 ? first : second;
      }
    }
    constexpr uint32_t kStep = 16;  // of K, in an MMA of bf16
    for (uint32_t col = 0; col < s.down_out.cols; col += Config::kLoraCols, pipe.advance()) {
      const uint32_t steps = ceil_div(min(s.down_out.cols - col, Config::kLoraCols), kStep);
      mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
      add_lora_block<Config>(acc, first_row(thread), lane(), pipe.a(pipe.stage), steps);
      // All warps that release the stage together have read it.
      if constexpr (!Config::Mma::kPerWarp) warpgroup_sync(kWarpgroupBarrier + thread / kWarpgroupThreads - 1);
      pipe.release(pipe.stage);
    }
  }

  // Calls f(fragment, column of the part) for the thread's column pairs that exist.
  template <class F>
  __device__ __forceinline__ void for_each_column(F f) {
#pragma unroll
    for (int n = 0; n < Config::kMmaN; n++) {
      const uint32_t col = col0 + 8 * n + lane() % 4 * 2;
      if (col >= part.out.cols) continue;
      f(n, col);
    }
  }

  // Adds the bias to the scaled accumulators, and returns the factor that they still need.
  __device__ __forceinline__ float add_bias() {
    const float factor = alpha();
    if (!s.bias.data) return factor;
    const float* bias = row_of<const float>(s.bias, 0) + part.first_col;
    for_each_column([&](int n, uint32_t col) {
      const float a = bias[col], b = bias[col + 1];
#pragma unroll
      for (int m = 0; m < Config::kMmaM; m++) {
        float* v = &acc[m][4 * n];
        v[0] = times(v[0], factor) + a, v[1] = times(v[1], factor) + b;
        v[2] = times(v[2], factor) + a, v[3] = times(v[3], factor) + b;
      }
    });
    return 1.0f;
  }

  __device__ __forceinline__ void store_linear(float factor) {
    store_as<Store, kBlockN>([&](int m, int e) { return times(acc[m][e], factor); });
  }

  __device__ __forceinline__ void apply_gate(float factor) {
    if (!part.extra.data) {
      if constexpr (kScaled) {
#pragma unroll
        for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
          for (int e = 0; e < kBlockN / 2; e++) acc[m][e] *= factor;
        }
      }
      return;
    }
    const bf16* gates = row_of<const bf16>(part.extra, 0);
    for_each_column([&](int n, uint32_t col) {
      float2 g = load_pair(gates + col);
      g.x = times(g.x, factor), g.y = times(g.y, factor);
#pragma unroll
      for (int m = 0; m < Config::kMmaM; m++) {
        float* v = &acc[m][4 * n];
        v[0] *= g.x, v[1] *= g.y, v[2] *= g.x, v[3] *= g.y;
      }
    });
  }

  // Adds the residual, whose boxes for the warpgroup's rows come through the pipeline.
  __device__ __forceinline__ void add_residual(Pipeline<Config>& pipe) {
    constexpr uint32_t kChunks = Config::kResidualCols / 8;  // of 16 bytes, in the rows of a box
    static_assert(Config::kResidualCols * sizeof(bf16) == kSwizzleRowBytes, "a row of a box is a row of the swizzle");
    const uint32_t group = thread / kWarpgroupThreads - 1, row = thread / 32 % kWarpgroupWarps * kWarpRows + lane() % kWarpRows;
    const uint32_t chunk = swizzled_chunk<kSwizzleRowBytes>(row, lane() / 16);
#pragma unroll
    for (uint32_t stage = 0; stage < Config::kResidualStages; stage++, pipe.advance()) {
      mbarrier_wait(pipe.full(pipe.stage), pipe.parity);
#pragma unroll
      for (uint32_t across = 0; across < Config::kResidualBoxesN; across++) {
        // Boxes are in sequence: for each range of columns the boxes of all warpgroups.
        const uint32_t box = across * Config::kResidualBoxesM + (Config::kSplitK ? 0 : group);
        if (box / Config::kBoxesPerStage != stage) continue;
        const uint32_t box_offset = box % Config::kBoxesPerStage * Config::kResidualBoxBytes;
        const uint32_t from = pipe.a(pipe.stage) + box_offset + row * kSwizzleRowBytes + chunk * 16;
#pragma unroll
        for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
          for (int j = 0; j < kChunks; j += 2) {
            if (across * kChunks + j >= Config::kMmaN) continue;
            uint32_t old[4];
            ldmatrix_x4(old, (from + m * kWgmmaTileBytes) ^ j * 16);
            float* v = &acc[m][4 * (across * kChunks + j)];
#pragma unroll
            for (int h = 0; h < 4; h++) {
              const float2 pair = unpack_pair(old[h]);
              v[2 * h] += pair.x, v[2 * h + 1] += pair.y;
            }
          }
        }
      }
      // All warps that release the stage together have read it.
      if constexpr (!Config::Mma::kPerWarp) warpgroup_sync(kWarpgroupBarrier + group);
      pipe.release(pipe.stage);
    }
  }

  __device__ __forceinline__ void swiglu() {
    const float gate = alpha(0), up = times(alpha(1), part.scale);
    const auto value = [&](int m, int e) { return silu(times(acc[m][e], gate)) * times(acc[m][kBlockN / 4 + e], up); };
    if constexpr (Store::kStoresE2m1) {
      if (part.out.dtype == KL_E2M1) return store_e2m1<kBlockN / 2>(value);
    }
    store_all<kBlockN / 2>(value);
  }

  // Normalizes and weights a pair of elements, and rotates it.
  static __device__ __forceinline__ void norm_rotate(float& a, float& b, float scale, float weight_a, float weight_b, float cosine,
                                                     float sine) {
    a = a * scale * weight_a, b = b * scale * weight_b;
    rope_rotate(a, b, cosine, sine);
  }

  __device__ __forceinline__ void qk_norm_rope() {
    constexpr int kHeads = kBlockN / 128;
    const float* weight = row_of<const float>(part.extra, 0);
    const uint32_t q = lane() % 4;
#pragma unroll
    for (int m = 0; m < Config::kMmaM; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float scale[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; h++) {
          const float* head = &acc[m][64 * h + 2 * half];
          float sum = 0.0f;
#pragma unroll
          for (int n = 0; n < 16; n++) sum += head[4 * n] * head[4 * n] + head[4 * n + 1] * head[4 * n + 1];
          // The norm cancels scales but for its epsilon.
          const float a = alpha();
          scale[h] = times(qk_norm_scale(times(quad_sum(sum), a * a), 128.0f, s.eps, part.scale), a);
          // A head past the end is not stored, and its values are not counted.
          if (Store::kStoresE4m3 && col0 + 128 * h >= part.out.cols) scale[h] = 0.0f;
        }
        // The row's angles, which all heads share: 64 cosines, then 64 sines.
        const float* angles = row_of<const float>(s.table, min(row0 + kWgmmaRows * m + lane() / 4 + 8 * half, s.x.rows - 1));
        if (s.rope == KL_ROPE_INTERLEAVED) {
#pragma unroll
          for (int n = 0; n < 16; n++) {
            const float2 w = load_pair(weight + 8 * n + 2 * q);
            const float cosine = angles[4 * n + q], sine = angles[64 + 4 * n + q];
#pragma unroll
            for (int h = 0; h < kHeads; h++) {
              float* v = &acc[m][64 * h + 4 * n + 2 * half];
              norm_rotate(v[0], v[1], scale[h], w.x, w.y, cosine, sine);
            }
          }
        } else {
#pragma unroll
          for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const uint32_t i = 8 * n + 2 * q + e;
              const float a = weight[i], b = weight[64 + i], cosine = angles[i], sine = angles[64 + i];
#pragma unroll
              for (int h = 0; h < kHeads; h++) {
                float* v = &acc[m][64 * h + 4 * n + 2 * half + e];
                norm_rotate(v[0], v[32], scale[h], a, b, cosine, sine);
              }
            }
          }
        }
      }
    }
    store_all<kBlockN>([&](int m, int e) { return acc[m][e]; });
  }

  __device__ __forceinline__ void run(Pipeline<Config>& pipe) {
    if (lane() == 0) tma_store_wait<0>();  // the stores of the previous tile have read the staging buffers
    apply_row_scales();
    if constexpr (Config::kLora) {
      if (s.down_out.data) add_lora(pipe);
    }
    if (part.epilogue == KL_GATE_RESIDUAL) {
      apply_gate(add_bias());
      add_residual(pipe);
      store_linear(1.0f);
    } else if (part.epilogue == KL_SWIGLU) {
      if constexpr (kBlockN / 2 % 16 == 0) swiglu();
    } else if (part.epilogue == KL_QK_NORM_ROPE) {
      if constexpr (kBlockN % 128 == 0) qk_norm_rope();
    } else {
      store_linear(add_bias());
    }
  }
};
}  // namespace kl::gemm
