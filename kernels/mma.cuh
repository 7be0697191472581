// Tensor cores the portable way (sm_80 and newer): asynchronous copies to shared memory, ldmatrix, mma.sync, and the tile of a
// product that gemm_mma.cu and conv_mma.cu share.
#pragma once

#include "common.cuh"

// Copies 16 bytes, or writes 16 zeros where there is nothing to copy. `from` is never read then.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of copies are under way.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit values; lanes 8 i to 8 i + 7 give the rows of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d += a b for a 16x16, b 16x8 in bf16, d 16x8 in f32. Lane l has of d rows l/4 and l/4 + 8, columns 2 (l%4) and the next.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A tile of x w^T: kRows rows of x by 128 rows of w, kWarps warps two abreast, kInner of the inner dimension at a time, kStages of
// them in shared memory. While one step of 16 is multiplied, the matrices of the next are loaded, so that neither waits for the other;
// the only barrier of a stage lies before its last step. 16-byte chunks of a row are exchanged by the row's bits, so that the eight
// rows of a matrix lie in eight different bank groups.
template <int kRows_, int kWarps, int kInner_, int kStages_>
struct MmaTile {
  static constexpr int kRows = kRows_, kCols = 128, kInner = kInner_, kStages = kStages_, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = kRows / (kWarps / 2), kWarpCols = kCols / 2;
  static constexpr int kM = kWarpRows / 16, kN = kWarpCols / 8, kSteps = kInner / 16;
  static constexpr uint32_t kStageBytes = (kRows + kCols) * kInner * 2, kRightAt = kRows * kInner * 2;
  // Each thread copies the same chunk of every kLines-th row.
  static constexpr int kChunks = kInner / 8, kLines = kThreads / kChunks;
  static constexpr int kLeftCopies = kRows / kLines, kRightCopies = kCols / kLines;
  // A tile of results on its way out, rows 16 bytes longer than they need to be, lies where the stages were.
  static constexpr uint32_t kOutPitch = kCols * 2 + 16;
  static constexpr uint32_t kSharedBytes = kStages * kStageBytes > kRows * kOutPitch ? kStages * kStageBytes : kRows * kOutPitch;
  static_assert(kInner == 32 || kInner == 64, "place() knows rows of 64 and 128 bytes");

  float sums[kM][kN][4];

  static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t chunk) {
    return kInner == 32 ? row * 64 + ((chunk ^ (row >> 1)) & 3) * 16 : row * 128 + ((chunk ^ row) & 7) * 16;
  }

  static __device__ __forceinline__ uint32_t line() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ uint32_t chunk() { return threadIdx.x % kChunks; }
  static __device__ __forceinline__ uint32_t warp_row() { return threadIdx.x / 64 * kWarpRows; }
  static __device__ __forceinline__ uint32_t warp_col() { return threadIdx.x / 32 % 2 * kWarpCols; }
  // Row and first column of sums[m][n][2 half] in the tile.
  static __device__ __forceinline__ uint32_t row_of_sum(int m, int half) {
    return warp_row() + m * 16 + half * 8 + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ uint32_t col_of_sum(int n) { return warp_col() + n * 8 + threadIdx.x % 4 * 2; }

  // Sums over `rounds` times kInner of the inner dimension, from round `first` on. left(i, k, valid) and right(i, k, valid) give the
  // address of row line() + kLines i of an operand, `k` elements and the thread's own chunk further, or set `valid` to false where
  // zeros stand.
  template <class Left, class Right>
  __device__ __forceinline__ void run(unsigned char* shared, uint32_t inner, uint32_t first, uint32_t rounds, Left left, Right right) {
    const uint32_t base = shared_address(shared), lane = threadIdx.x % 32;
    const uint32_t copied_at = base + place(line(), chunk());
    const auto fetch = [&](uint32_t round, uint32_t stage) {
      if (round < rounds) {
        const uint32_t k = (first + round) * kInner, to = copied_at + stage * kStageBytes;
        const bool exists = k + chunk() * 8 < inner;
#pragma unroll
        for (int i = 0; i < kLeftCopies; i++) {
          bool valid = exists;
          const bf16* from = left(i, k, valid);
          copy_async(to + i * kLines * kInner * 2, from, valid);
        }
#pragma unroll
        for (int i = 0; i < kRightCopies; i++) {
          bool valid = exists;
          const bf16* from = right(i, k, valid);
          copy_async(to + kRightAt + i * kLines * kInner * 2, from, valid);
        }
      }
      copy_commit();
    };
    // Of the first step. Further ones lie where two bits of the address are others, further matrices whole rows away.
    const uint32_t a_at = base + place(warp_row() + lane % 16, lane / 16);
    const uint32_t b_at = base + kRightAt + place(warp_col() + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    uint32_t a[2][kM][4], b[2][kN / 2][4];
    const auto load = [&](int side, uint32_t stage, int step) {
      const uint32_t a_from = (a_at + stage * kStageBytes) ^ step * 32, b_from = (b_at + stage * kStageBytes) ^ step * 32;
#pragma unroll
      for (int m = 0; m < kM; m++) load_matrices(a[side][m], a_from + m * 16 * kInner * 2);
#pragma unroll
      for (int n = 0; n < kN / 2; n++) load_matrices(b[side][n], b_from + n * 16 * kInner * 2);
    };
#pragma unroll
    for (int m = 0; m < kM; m++) {
#pragma unroll
      for (int n = 0; n < kN; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sums[m][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int round = 0; round < kStages - 1; round++) fetch(round, round);
    copy_wait<kStages - 2>();
    __syncthreads();
    load(0, 0, 0);
    for (uint32_t round = 0, stage = 0; round < rounds; round++) {
      const uint32_t next = stage + 1 < kStages ? stage + 1 : 0, used_up = stage > 0 ? stage - 1 : kStages - 1;
#pragma unroll
      for (int step = 0; step < kSteps; step++) {
        const int side = step % 2;
        if (step + 1 < kSteps) {
          load(side ^ 1, stage, step + 1);
        } else {
          copy_wait<kStages - 2>();
          __syncthreads();  // the next stage has arrived, and everyone has loaded the last of this one
          load(side ^ 1, next, 0);
        }
        if (step == 0) fetch(round + kStages - 1, used_up);
#pragma unroll
        for (int m = 0; m < kM; m++) {
#pragma unroll
          for (int i = 0; i < kN; i++) {
            const int n = m % 2 ? kN - 1 - i : i;  // back and forth, so that an operand is used twice in a row
            mma(sums[m][n], a[side][m], b[side][n / 2][n % 2 * 2], b[side][n / 2][n % 2 * 2 + 1]);
          }
        }
      }
      stage = next;
    }
    copy_wait<0>();
    __syncthreads();  // shared memory is free for results
  }

  // Puts a pair of results where the stages were.
  static __device__ __forceinline__ void stage_pair(unsigned char* shared, uint32_t row, uint32_t col, float a, float b) {
    *reinterpret_cast<uint32_t*>(shared + row * kOutPitch + col * 2) = pack(a, b);
  }

  // Writes the staged tile of `width` columns to rows and columns from (row0, col0) on, as far as the matrix goes.
  static __device__ __forceinline__ void store_staged(const unsigned char* shared, const KlMat& out, uint64_t row0, uint64_t col0,
                                                      uint32_t width) {
    __syncthreads();
    const uint32_t chunks = width / 8;
    const bool vectors = out.data % 16 == 0 && out.stride % 8 == 0;
    for (uint32_t i = threadIdx.x; i < kRows * chunks; i += kThreads) {
      const uint32_t row = i / chunks, col = i % chunks * 8;
      if (row0 + row >= out.rows || col0 + col >= out.cols) continue;
      bf16* to = row_of<bf16>(out, row0 + row) + col0 + col;
      const bf16* from = reinterpret_cast<const bf16*>(shared + row * kOutPitch + col * 2);
      if (vectors && col0 + col + 8 <= out.cols) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (uint32_t e = 0; e < 8 && col0 + col + e < out.cols; e++) to[e] = from[e];
      }
    }
  }
};
