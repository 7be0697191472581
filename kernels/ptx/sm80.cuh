// One wrapper per instruction that every supported GPU has (sm_80 and newer): cp.async, ldmatrix, mma.sync, flags between CTAs, cache
// hints, ex2. No file outside this folder contains inline assembly, except for empty statements that hide a value from the compiler.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#include <ptx/entry.cuh>

// The 32-bit address in the shared state space, as PTX instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Release/acquire pair for flags between CTAs: a thread that acquires the flag sees everything that was written before the release.
__device__ __forceinline__ void store_release(uint32_t* to, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

// Adds to a flag, with the same guarantee.
__device__ __forceinline__ void add_release(uint32_t* to, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// Loads 16 bytes from L2, past L1. The asm is volatile so that a batch of these loads stays in program order.
__device__ __forceinline__ float4 load_uncached(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}

// Loads 16 bytes of read-only memory at this point of the program: without `volatile` the compiler would move the load to its first use.
__device__ __forceinline__ uint4 load_now(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// 2^v, accurate to two ulp; subnormal results are flushed to zero.
__device__ __forceinline__ float exp2_approx(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}

// Four bytes of a word, each chosen by a nibble of the selector; with 8 added to it, the byte is its sign bit eight times.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t v) {
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(v), "n"(kSelector));
  return result;
}

// Four bytes of two words, each chosen by a nibble of the selector: 0 to 3 are bytes of `a`, 4 to 7 bytes of `b`.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "n"(kSelector));
  return result;
}

// Products of two pairs of bf16; subnormal numbers are kept. Before sm_90 there is only the FMA: adding -0 changes nothing.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#else
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#endif
  return product;
}

// ------------------------------------------------------------------------------------------- cp.async, ldmatrix, mma.sync

// Copies 16 bytes to shared memory, or zero-fills them if `valid` is false; `from` is not read then.
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8x8 matrices of 16-bit values; lanes 8 i to 8 i + 7 supply the row addresses of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Loads four 8x8 matrices as ldmatrix_x4 does and transposes each.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d += a b with a 16x16 and b 16x8 in bf16, d 16x8 in f32. Lane l holds rows l/4 and l/4 + 8 of d, columns 2 (l%4) and 2 (l%4) + 1.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
