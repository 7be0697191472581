// Expands quantized weights to bf16, portable (sm_80 and newer): the pre-pass of a GEMM on a GPU whose tensor cores do not multiply them.
//
//   kl_expand   to = e4m3 codes, or e2m1 codes times their block scales, exactly. The GEMM applies row scales and tensor scales to its
//               sums
//
// The grid has the CTAs of the largest matrix along x, and one matrix per index along y.
// Bound: memory. A weight is read once in 8 or 4.5 bits and written in 16; much of that is still in L2 when the GEMM reads it.
// Needs: columns and strides multiples of 16, 16-byte aligned addresses, matrices of less than 2^32 elements.
#include <common/expand.cuh>
#include <common/types.cuh>

// Expands eight elements, from (row, col) on.
__device__ __forceinline__ uint4 expand(const KlMat& w, uint32_t row, uint32_t col) {
  const uint64_t at = row * w.stride + col;
  if (w.dtype == KL_E4M3) {
    const uint2 codes = __ldcs(reinterpret_cast<const uint2*>(w.data + at));
    const uint2 a = e4m3_to_bf16(codes.x), b = e4m3_to_bf16(codes.y);
    return make_uint4(a.x, a.y, b.x, b.y);
  }
  const uint32_t codes = __ldcs(reinterpret_cast<const uint32_t*>(w.data + at / 2));
  const uint32_t scale = reinterpret_cast<const uint8_t*>(w.scales)[block_scale_offset(row, col / 16, static_cast<uint32_t>(w.stride))];
  return e2m1_to_bf16(codes, block_scale(scale));
}

KL_ENTRY(kl_expand, KlExpand, KL_EXPAND_THREADS, 1) {
  const KlMat& w = p.w[blockIdx.y];
  const uint32_t along = w.cols / KL_EXPAND_VECTOR, vectors = w.rows * along;
  const uint32_t first = blockIdx.x * KL_EXPAND_BATCH * KL_EXPAND_THREADS + threadIdx.x;
  uint4 values[KL_EXPAND_BATCH];
#pragma unroll
  for (uint32_t i = 0; i < KL_EXPAND_BATCH; i++) {
    const uint32_t at = first + i * KL_EXPAND_THREADS;
    if (at < vectors) values[i] = expand(w, at / along, at % along * KL_EXPAND_VECTOR);
  }
#pragma unroll
  for (uint32_t i = 0; i < KL_EXPAND_BATCH; i++) {
    const uint32_t at = first + i * KL_EXPAND_THREADS;
    if (at < vectors) reinterpret_cast<uint4*>(p.to[blockIdx.y])[at] = values[i];
  }
}
