// Norms of rows.
//
//   kl_rms_norm_*    y = x / sqrt(mean(x^2) + eps) * weight
//   kl_layer_norm_*  y = (1 + scale) * (x - mean) / sqrt(var + eps) + shift, per stream (AdaLN modulation)
//                    _1024 to _8192: aligned rows of bf16 with at most that many columns, a multiple of 8
//                    _e4m3_1024 to _e4m3_8192: results in e4m3, divided by their scale
//                    _e2m1_1024 to _e2m1_8192: results in e2m1 with block scales
//                    _any: all others, in and out
//
// Bound: HBM. Rows are read once and stay in registers in their storage type. A warp computes squared deviations from its own mean, and
// the moments of all warps are merged behind one barrier (Chan et al. 1979), so a mean far from zero costs no precision. All sums are
// added in a fixed order.
#include <type_traits>

#include <common/math.cuh>
#include <common/moments.cuh>
#include <common/nvfp4.cuh>
#include <common/reduce.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>
#include <ptx/sm80.cuh>

constexpr uint32_t kRows = KL_NORM_ROWS;  // rows per CTA, which share the loads of modulations and the barriers

// Makes these registers opaque to the compiler, which would otherwise keep eight unpacked floats alive next to every four words.
__device__ __forceinline__ void forget(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

// a / n, correctly rounded except in rare cases: an error in the mean shows if the values of a row hardly differ from it.
__device__ __forceinline__ float divide(float a, float n) {
  const float inverse = __fdividef(1.0f, n), near = a * inverse;
  return fmaf(fmaf(-near, n, a), inverse, near);
}

// The type of results in NVFP4.
struct e2m1 {};

// Stores kVector values as one half of an e2m1 block; the neighboring lane has the other half. All lanes of a warp call it. Both halves
// have a place inside the matrix, or neither has.
__device__ __forceinline__ void store_half_block(const KlMat& m, uint32_t row, uint32_t col, const float (&v)[kVector], bool inside) {
  const uint32_t mine = largest_magnitude(v);
  const QuantizedBlock block(max(mine, __shfl_xor_sync(0xffffffffu, mine, 1)), m.scale);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kVector / 2; i++) codes |= pack_e2m1(v[2 * i] * block.inverse, v[2 * i + 1] * block.inverse) << 8 * i;
  if (!inside) return;
  *reinterpret_cast<uint32_t*>(code_pair(m, row, col)) = codes;
  if (col % 16 == 0) block_scale(m, row, col / 16) = static_cast<uint8_t>(block.scale);
}

// Normalizes rows `first` to `first` + kRows of aligned bf16. A thread has kVecs vectors. Only the last may lie past the end; the thread
// then loads the row's first vector instead, and neither counts nor stores it. A row past the end repeats the last row, with the same
// result. With kRms there is no mean and no shift, and `scale` is the weight. Results are of type T: bf16, e4m3 or e2m1.
template <class T, int kThreads, int kVecs, bool kRms>
__device__ __forceinline__ void norm_rows(const KlMat& out, const KlMat& x, const KlMat& scale, const KlMat& shift, uint32_t first,
                                          float eps, uint64_t saturated, StoredMoments (&moments)[kRows][kThreads / 32]) {
  constexpr bool kE4m3 = std::is_same_v<T, e4m3>, kE2m1 = std::is_same_v<T, e2m1>, kCodes = kE4m3 || kE2m1;
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
    sum_lanes<32>(mean);
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
  sum_lanes<32>(squares);
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    if (lane() == 0) moments[r][threadIdx.x / 32] = StoredMoments{mean[r], squares[r], count};
  }
  __syncthreads();

  const float n = static_cast<float>(x.cols), inverse = kE4m3 ? 1.0f / out.scale : 1.0f;
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
      const StoredMoments m = moments[r][w];
      const float d = m.mean - whole;
      deviations += kRms ? m.squares : m.squares + d * d * m.count;
    }
    rstd[r] = rsqrtf(__fdividef(deviations, n) + eps);
    if constexpr (kCodes) {
      // Next to a tie, all bits of a value decide which code is nearest, so the mean is subtracted first.
      rstd[r] *= inverse;
      minus[r] = -whole;
    } else {
      // Truncated to 16 significant bits, so that its product with a bf16 is exact: a value equal to the mean becomes zero, however
      // large.
      rstd[r] = __uint_as_float(__float_as_uint(rstd[r]) & 0xffffff00u);
      minus[r] = -whole * rstd[r];
    }
  }
  uint32_t beyond[kRows] = {};
  const auto normalized = [&](float v, int r) {
    if constexpr (kRms) return v * rstd[r];
    if constexpr (kCodes) return (v + minus[r]) * rstd[r];
    return v * rstd[r] + minus[r];
  };
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
      for (int j = 0; j < kVector; j++) v[j] = kRms ? normalized(v[j], r) * a[j] : normalized(v[j], r) * (1.0f + a[j]) + b[j] * inverse;
      const bool inside = i < kVecs - 1 || full;
      if constexpr (kE2m1) {
        store_half_block(out, row(r), column(i), v, inside);
      } else if (inside) {
        if constexpr (kE4m3) beyond[r] += saturated_of<kVector>(v);
        store_vector(row_of<T>(out, row(r)) + column(i), v);
      }
    }
  }
  // The row that is repeated counts once.
#pragma unroll
  for (int r = 0; r < kRows; r++) add_saturated(saturated, first + r < x.rows ? beyond[r] : 0);
}

template <class T, int kThreads, int kVecs>
__device__ __forceinline__ void layer_norm_rows(const KlLayerNorm& p) {
  KL_SHARED(StoredMoments, moments, [kRows][kThreads / 32]);
  const uint32_t blocks = ceil_div(p.stream[0].x.rows, kRows);
  const bool second = blockIdx.x >= blocks;
  const KlModulated& s = p.stream[second];
  const uint32_t first = (second ? blockIdx.x - blocks : blockIdx.x) * kRows;
  norm_rows<T, kThreads, kVecs, false>(s.out, s.x, s.scale, s.shift, first, p.eps, p.saturated, moments);
}

// Resident CTAs per SM of a norm into e4m3: one fewer where the conversion takes registers, because the GPU has no instruction for it.
constexpr int e4m3_ctas(int ctas) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  return ctas > 1 ? ctas - 1 : 1;
#else
  return ctas;
#endif
}

// Resident CTAs per SM of a norm into e2m1, which scales blocks on every GPU.
constexpr int e2m1_ctas(int ctas) { return ctas > 1 ? ctas - 1 : 1; }

// A CTA for rows of at most kCols columns. A thread has kVecs vectors of a row.
template <int kCols, int kVecs>
struct RowConfig {
  static constexpr int kThreads = kCols / (kVecs * kVector);
  static constexpr uint32_t kSharedBytes = 0;
  static_assert(kThreads * kVecs * kVector == kCols, "threads have whole vectors");
};

// Entry points for rows of at most `cols` columns, `vecs` vectors a thread. Each size has its own: one kernel for all would allocate the
// registers of the largest.
#define KL_FAMILY_norm_rows ~,
#define KL_ROW(family, cols, vecs, layer_ctas_per_sm, rms_ctas_per_sm)                                                           \
  using Row##cols = RowConfig<cols, vecs>;                                                                                       \
  KL_TILE_ENTRY(kl_layer_norm_##cols, KlLayerNorm, Row##cols, layer_ctas_per_sm) {                                               \
    layer_norm_rows<bf16, Row##cols::kThreads, vecs>(p);                                                                         \
  }                                                                                                                              \
  KL_TILE_ENTRY(kl_layer_norm_e4m3_##cols, KlLayerNorm, Row##cols, e4m3_ctas(layer_ctas_per_sm)) {                               \
    layer_norm_rows<e4m3, Row##cols::kThreads, vecs>(p);                                                                         \
  }                                                                                                                              \
  KL_TILE_ENTRY(kl_layer_norm_e2m1_##cols, KlLayerNorm, Row##cols, e2m1_ctas(layer_ctas_per_sm)) {                               \
    layer_norm_rows<e2m1, Row##cols::kThreads, vecs>(p);                                                                         \
  }                                                                                                                              \
  KL_TILE_ENTRY(kl_rms_norm_##cols, KlRmsNorm, Row##cols, rms_ctas_per_sm) {                                                     \
    constexpr int kThreads = Row##cols::kThreads;                                                                                \
    KL_SHARED(StoredMoments, moments, [kRows][kThreads / 32]);                                                                   \
    norm_rows<bf16, kThreads, vecs, true>(p.out, p.x, p.weight, p.weight, blockIdx.x * kRows, p.eps, p.saturated, moments);      \
  }
#include <kernels.def>

// The sum of f(column) over all columns, computed by a CTA of KL_NORM_THREADS threads; every thread gets it.
template <class F>
__device__ __forceinline__ float sum_of_columns(uint32_t cols, F f) {
  KL_SHARED(float, warps, [KL_NORM_THREADS / 32]);
  float sum = 0.0f;
  for (uint32_t col = threadIdx.x; col < cols; col += KL_NORM_THREADS) sum += f(col);
  sum = warp_sum(sum);
  if (lane() == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < KL_NORM_THREADS / 32; warp++) sum += warps[warp];
  return sum;
}

// Calls f(column, whether it is inside the row) for all columns. All lanes of a warp do so together, for consecutive columns.
template <class F>
__device__ __forceinline__ void for_columns_of_warps(uint32_t cols, F f) {
  for (uint32_t first = threadIdx.x / 32 * 32; first < cols; first += KL_NORM_THREADS) f(first + lane(), first + lane() < cols);
}

// Rows of any width, dtype and alignment, one per CTA, read again for each pass.
KL_ENTRY(kl_rms_norm_any, KlRmsNorm, KL_NORM_THREADS) {
  const uint64_t row = blockIdx.x;
  const float squares = sum_of_columns(p.x.cols, [&](uint32_t col) {
    const float v = load_any(p.x, row, col);
    return v * v;
  });
  const float scale = rsqrtf(squares / static_cast<float>(p.x.cols) + p.eps);
  for_columns_of_warps(p.x.cols, [&](uint32_t col, bool inside) {
    const float v = inside ? load_any(p.x, row, col) * scale * load<float>(p.weight, 0, col) : 0.0f;
    store_of_lanes(p.out, row, col, v, inside, p.saturated);
  });
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
  for_columns_of_warps(s.x.cols, [&](uint32_t col, bool inside) {
    const float v = inside ? (load_any(s.x, row, col) - mean) * rstd : 0.0f;
    const float modulated = inside ? (1.0f + load_any(s.scale, 0, col)) * v + load_any(s.shift, 0, col) : 0.0f;
    store_of_lanes(s.out, row, col, modulated, inside, p.saturated);
  });
}
