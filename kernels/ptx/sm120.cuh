// Wrappers of instructions that only GPUs of compute capability 12.x have: block-scaled mma.sync. Builds with KL_EMULATE, for other GPUs,
// compute them in software, to the bit as published (ptx/block_scaled_mma.cuh), so that the kernels can be tested there.
#pragma once

#include <ptx/sm100.cuh>
#include <ptx/sm90.cuh>

#if defined(KL_EMULATE)
#include <ptx/block_scaled_mma.cuh>
#else

// d += a b with a 16x64 and b 64x8 in e2m1, d 16x8 in f32, and an e4m3 scale for every sixteen of K. Fragments have the byte layout of
// `mma`: where a lane has two elements of bf16 it has eight, from the lowest nibble on. A word holds the scales of four blocks: lanes with
// lane % 4 / 2 = kA supply row lane / 4 + lane % 2 * 8 of a, and lanes with lane % 4 = kB column lane / 4 of b.
template <int kA, int kB>
__device__ __forceinline__ void mma_nvf4(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scales_a, uint32_t scales_b) {
  asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%14, %15};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scales_a), "n"(0), "n"(kA), "r"(scales_b), "n"(0), "n"(kB));
}

// mma_e4m3 by the block-scaled instruction, with scales of one. On these GPUs it has twice the rate.
__device__ __forceinline__ void mma_e4m3_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  constexpr uint32_t kOnes = 0x7f7f7f7f;  // powers of two with a bias of 127
  asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%10}, {%11, %12};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(kOnes), "n"(0), "n"(0));
}

#endif
