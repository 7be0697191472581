// The multistage GEMM mainloop of the portable tensor-core kernels (sm_80 and newer): gemm_bf16_sm80.cu, gemm_fp8_sm89.cu and
// conv_bf16_sm80.cu share it.
#pragma once

#include <common/math.cuh>
#include <common/mma.cuh>
#include <common/swizzle.cuh>
#include <common/types.cuh>
#include <common/vectors.cuh>

namespace kl::gemm::portable {
// A CTA tile of A B^T: kBlockM rows of A by 128 rows of B, computed by kWarps warps in two columns. K is consumed kBlockK at a time
// through a cp.async pipeline of kStages stages in shared memory. Register fragments are double-buffered: while the MMAs of one step of 32
// bytes of K run, ldmatrix loads the fragments of the next, and the only __syncthreads of a stage comes before its last step. Shared memory
// is swizzled: the 16-byte chunks of a row are permuted by the row index, so that ldmatrix reads eight rows without bank conflicts. With
// promotion the products of a k-block are summed from zero on, and their sum is added to the accumulators. Ada keeps thirteen binary places
// of a sum of e4m3 products, and a k-block has only 128 of them.
template <int kBlockM_, int kBlockN_, int kWarps, int kBlockK_, int kStages_, class Mma = Bf16Mma, bool kPromotes = false>
struct MmaTile {
  using Element = typename Mma::Element;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_, kStages = kStages_, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = kBlockM / (kWarps / 2), kWarpCols = kBlockN / 2;
  static constexpr int kMmaM = kWarpRows / 16, kMmaN = kWarpCols / 8;
  static constexpr uint32_t kRowBytes = kBlockK * sizeof(Element), kStageBytes = (kBlockM + kBlockN) * kRowBytes, kBOffset = kBlockM * kRowBytes;
  static constexpr int kMmaK = kRowBytes / 32;
  // Each thread copies the same 16-byte chunk, of kChunk elements, of every kRowsPerCopy-th row.
  static constexpr int kChunk = 16 / sizeof(Element), kChunksPerRow = kBlockK / kChunk, kRowsPerCopy = kThreads / kChunksPerRow;
  static constexpr int kACopies = kBlockM / kRowsPerCopy, kBCopies = kBlockN / kRowsPerCopy;
  // The epilogue stages the output tile where the pipeline stages were; 16 bytes of padding per row avoid bank conflicts.
  static constexpr uint32_t kOutPitch = kBlockN * 2 + 16;
  static constexpr uint32_t kSharedBytes = kStages * kStageBytes;
  static_assert(kBlockM * kOutPitch <= kSharedBytes, "the output tile is larger than the stages");
  static_assert(kBlockN == KL_MMA_COLS, "the host counts on tiles of whole heads");
  static_assert(kRowBytes == 64 || kRowBytes == 128, "the fragments of a step differ in two swizzled address bits");

  float acc[kMmaM][kMmaN][4];

  static __device__ __forceinline__ uint32_t copy_row() { return threadIdx.x / kChunksPerRow; }
  static __device__ __forceinline__ uint32_t copy_chunk() { return threadIdx.x % kChunksPerRow; }
  static __device__ __forceinline__ uint32_t warp_row() { return threadIdx.x / 64 * kWarpRows; }
  static __device__ __forceinline__ uint32_t warp_col() { return threadIdx.x / 32 % 2 * kWarpCols; }
  // The row, and the first column, of acc[m][n][2 half] in the tile.
  static __device__ __forceinline__ uint32_t row_of_acc(int m, int half) {
    return warp_row() + m * 16 + half * 8 + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ uint32_t col_of_acc(int n) { return warp_col() + n * 8 + threadIdx.x % 4 * 2; }

  // Accumulates `k_blocks` blocks of kBlockK, from block `first_k_block` on. row_a(i, k, valid) and row_b(i, k, valid) return the address
  // of row copy_row() + kRowsPerCopy i of an operand, offset by `k` elements and the thread's own chunk, or set `valid` to false where
  // the operand is zero.
  template <class RowA, class RowB>
  __device__ __forceinline__ void mainloop(unsigned char* shared, uint32_t k_size, uint32_t first_k_block, uint32_t k_blocks, RowA row_a,
                                           RowB row_b) {
    const uint32_t base = shared_address(shared), lane = threadIdx.x % 32;
    const uint32_t copy_to = base + swizzled<kRowBytes>(copy_row(), copy_chunk());
    const auto fetch = [&](uint32_t k_block, uint32_t stage) {
      if (k_block < k_blocks) {
        const uint32_t k = (first_k_block + k_block) * kBlockK, to = copy_to + stage * kStageBytes;
        const bool exists = k + copy_chunk() * kChunk < k_size;
#pragma unroll
        for (int i = 0; i < kACopies; i++) {
          bool valid = exists;
          const Element* from = row_a(i, k, valid);
          cp_async(to + i * kRowsPerCopy * kRowBytes, from, valid);
        }
#pragma unroll
        for (int i = 0; i < kBCopies; i++) {
          bool valid = exists;
          const Element* from = row_b(i, k, valid);
          cp_async(to + kBOffset + i * kRowsPerCopy * kRowBytes, from, valid);
        }
      }
      cp_async_commit();
    };
    // Fragment addresses of the first step. In later steps two swizzled address bits differ; other fragments are whole rows away.
    const uint32_t a_address = base + swizzled<kRowBytes>(warp_row() + lane % 16, lane / 16);
    const uint32_t b_address = base + kBOffset + swizzled<kRowBytes>(warp_col() + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    uint32_t a[2][kMmaM][4], b[2][kMmaN / 2][4];
    const auto load = [&](int buffer, uint32_t stage, int step) {
      const uint32_t a_from = (a_address + stage * kStageBytes) ^ step * 32, b_from = (b_address + stage * kStageBytes) ^ step * 32;
#pragma unroll
      for (int m = 0; m < kMmaM; m++) ldmatrix_x4(a[buffer][m], a_from + m * 16 * kRowBytes);
#pragma unroll
      for (int n = 0; n < kMmaN / 2; n++) ldmatrix_x4(b[buffer][n], b_from + n * 16 * kRowBytes);
    };
#pragma unroll
    for (int m = 0; m < kMmaM; m++) {
#pragma unroll
      for (int n = 0; n < kMmaN; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) acc[m][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int k_block = 0; k_block < kStages - 1; k_block++) fetch(k_block, k_block);
    cp_async_wait<kStages - 2>();
    __syncthreads();
    load(0, 0, 0);
    constexpr int kSums = kPromotes ? kMmaN : 1;
    float sums[kMmaM][kSums][4] = {};  // sums of a k-block
    for (uint32_t k_block = 0, stage = 0; k_block < k_blocks; k_block++) {
      const uint32_t next = stage + 1 < kStages ? stage + 1 : 0, free_stage = stage > 0 ? stage - 1 : kStages - 1;
#pragma unroll
      for (int step = 0; step < kMmaK; step++) {
        const int buffer = step % 2;
        if (step + 1 < kMmaK) {
          load(buffer ^ 1, stage, step + 1);
        } else {
          cp_async_wait<kStages - 2>();
          __syncthreads();  // the next stage has arrived, and all warps have loaded the last fragments of this one
          load(buffer ^ 1, next, 0);
        }
        if (step == 0) fetch(k_block + kStages - 1, free_stage);
#pragma unroll
        for (int m = 0; m < kMmaM; m++) {
#pragma unroll
          for (int i = 0; i < kMmaN; i++) {
            const int n = m % 2 ? kMmaN - 1 - i : i;  // serpentine order, so that consecutive MMAs share an operand
            Mma::multiply(kPromotes ? sums[m][n % kSums] : acc[m][n], a[buffer][m], b[buffer][n / 2][n % 2 * 2],
                          b[buffer][n / 2][n % 2 * 2 + 1]);
          }
        }
      }
      if constexpr (kPromotes) {
#pragma unroll
        for (int m = 0; m < kMmaM; m++) {
#pragma unroll
          for (int n = 0; n < kMmaN; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) acc[m][n][e] += sums[m][n][e], sums[m][n][e] = 0.0f;
          }
        }
      }
      stage = next;
    }
    cp_async_wait<0>();
    __syncthreads();  // the epilogue may now overwrite the pipeline stages
  }

  // Adds a bf16 product over `cols` columns of K, whatever the type of the other operands. row_a(row) and row_b(row) return the addresses
  // of the operands' rows. There are few columns, so nothing is copied ahead.
  template <class RowA, class RowB>
  __device__ __forceinline__ void add_product(unsigned char* shared, uint32_t cols, RowA row_a, RowB row_b) {
    constexpr uint32_t kStageCols = kRowBytes / sizeof(bf16), kChunkCols = 16 / sizeof(bf16);
    const uint32_t base = shared_address(shared), lane = threadIdx.x % 32;
    const uint32_t a_address = base + swizzled<kRowBytes>(warp_row() + lane % 16, lane / 16);
    const uint32_t b_address = base + kBOffset + swizzled<kRowBytes>(warp_col() + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    for (uint32_t col = 0; col < cols; col += kStageCols) {
      const uint32_t at = col + copy_chunk() * kChunkCols;
      const auto copy = [&](uint32_t row, const bf16* from) {
        cp_async(base + swizzled<kRowBytes>(row, copy_chunk()), from + (at < cols ? at : 0), at < cols);
      };
      for (uint32_t row = copy_row(); row < kBlockM; row += kRowsPerCopy) copy(row, row_a(row));
      for (uint32_t row = copy_row(); row < kBlockN; row += kRowsPerCopy) copy(kBlockM + row, row_b(row));
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
#pragma unroll 1
      for (uint32_t step = 0; step < kRowBytes; step += 32) {
        uint32_t a[kMmaM][4];
#pragma unroll
        for (int m = 0; m < kMmaM; m++) ldmatrix_x4(a[m], (a_address ^ step) + m * 16 * kRowBytes);
#pragma unroll
        for (int n = 0; n < kMmaN; n += 2) {
          uint32_t b[4];
          ldmatrix_x4(b, (b_address ^ step) + n * 8 * kRowBytes);
#pragma unroll
          for (int m = 0; m < kMmaM; m++) {
            Bf16Mma::multiply(acc[m][n], a[m], b[0], b[1]);
            Bf16Mma::multiply(acc[m][n + 1], a[m], b[2], b[3]);
          }
        }
      }
      __syncthreads();  // the next block, or the epilogue, may overwrite this one
    }
  }

  // Writes a pair of results to the staged output tile.
  static __device__ __forceinline__ void stage_pair(unsigned char* shared, uint32_t row, uint32_t col, float a, float b) {
    store_pair(reinterpret_cast<bf16*>(shared + row * kOutPitch + col * 2), a, b);
  }

  // Writes a pair of results to the staged output tile in e4m3.
  static __device__ __forceinline__ void stage_e4m3(unsigned char* shared, uint32_t row, uint32_t col, float a, float b) {
    *reinterpret_cast<uint16_t*>(shared + row * kOutPitch + col) = static_cast<uint16_t>(pack_e4m3(a, b));
  }

  // Stores the staged output tile of `width` columns at (row0, col0), clipped to the matrix.
  template <class T = bf16>
  static __device__ __forceinline__ void store_staged(const unsigned char* shared, const KlMat& out, uint64_t row0, uint64_t col0,
                                                      uint32_t width) {
    store_staged_rows<T>(shared, out, [&](uint32_t row) { return row0 + row; }, col0, width);
  }

  // Stores the staged output tile: its row `row` becomes row row_at(row) of the matrix, if the matrix has that row.
  template <class T = bf16, class F>
  static __device__ __forceinline__ void store_staged_rows(const unsigned char* shared, const KlMat& out, F row_at, uint64_t col0,
                                                           uint32_t width) {
    __syncthreads();
    constexpr uint32_t kPerChunk = 16 / sizeof(T);
    const uint32_t chunks = width / kPerChunk;
    const bool vectors = out.data % 16 == 0 && out.stride % kPerChunk == 0;
    for (uint32_t i = threadIdx.x; i < kBlockM * chunks; i += kThreads) {
      const uint32_t row = i / chunks, col = i % chunks * kPerChunk;
      const uint64_t out_row = row_at(row);
      if (out_row >= out.rows || col0 + col >= out.cols) continue;
      T* to = row_of<T>(out, out_row) + col0 + col;
      const T* from = reinterpret_cast<const T*>(shared + row * kOutPitch + col * sizeof(T));
      if (vectors && col0 + col + kPerChunk <= out.cols) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (uint32_t e = 0; e < kPerChunk && col0 + col + e < out.cols; e++) to[e] = from[e];
      }
    }
  }
};
}  // namespace kl::gemm::portable
