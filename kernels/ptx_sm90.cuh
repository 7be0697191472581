// One wrapper per instruction that Hopper added and C++ has no name for. Nothing else of ours contains assembly for it. What lies in
// shared memory is named by its address there (shared_address): half as many registers as a pointer.
#pragma once

#include "common.cuh"

// ------------------------------------------------------------------------------------------------------------ barriers

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and says how many bytes the copy engine will bring before the phase is complete.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same barrier of another block of the cluster. Says nothing about what this thread wrote: it is for having read.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Waits for the end of the phase of that parity.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Two warpgroups meet at a numbered barrier: one waits there for the other, which goes on.
__device__ __forceinline__ void named_barrier_sync(uint32_t id) { asm volatile("barrier.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void named_barrier_arrive(uint32_t id) { asm volatile("barrier.arrive %0, 256;" ::"r"(id) : "memory"); }

// --------------------------------------------------------------------------------------------------------- copy engine

// Copies a box of a matrix to shared memory; `barrier` counts the bytes.
__device__ __forceinline__ void tma_load_2d(uint32_t to, const KlTensorMap* map, int32_t col, int32_t row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map),
      "r"(col), "r"(row), "r"(barrier)
      : "memory");
}

// The same, to the same place in every block of the cluster that `mask` names; each one's barrier counts the bytes.
__device__ __forceinline__ void tma_load_2d_multicast(uint32_t to, const KlTensorMap* map, int32_t col, int32_t row, uint32_t barrier,
                                                   uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(map), "r"(col), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}

// Copies a box to a matrix; what lies beyond its edges is left out. Writes of the threads come before it by `fence_shared_writes`.
__device__ __forceinline__ void tma_store_2d(const KlTensorMap* map, uint32_t from, int32_t col, int32_t row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(col), "r"(row), "r"(from)
      : "memory");
}

// Until all but so many of this thread's stores have read their boxes.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// What threads wrote to shared memory comes before what the copy engine reads of it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Brings a line of global memory near.
__device__ __forceinline__ void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p) : "memory"); }

__device__ __forceinline__ void prefetch_tensor_map(const KlTensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ------------------------------------------------------------------------------------------------- warpgroup products

// Writes to shared memory and registers come before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but so many groups are done.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// An operand in shared memory: rows of 128 bytes with the 128-byte swizzle, eight of them 1024 bytes after the eight before.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

#define KL_REGS_64                                                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, " \
  "%27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KL_REGS_80 KL_REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define KL_REGS_96 KL_REGS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KL_REGS_104 KL_REGS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define KL_REGS_128                                                                                                                  \
  KL_REGS_104 ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
               "%123, %124, %125, %126, %127"
#define KL_ACC_4(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define KL_ACC_16(i) KL_ACC_4(i), KL_ACC_4(i + 4), KL_ACC_4(i + 8), KL_ACC_4(i + 12)
#define KL_ACC_64(i) KL_ACC_16(i), KL_ACC_16(i + 16), KL_ACC_16(i + 32), KL_ACC_16(i + 48)
#define KL_WGMMA(cols, names, a_name, b_name, accumulate_name, ...)                                                       \
  asm volatile(                                                                                                           \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate_name ", 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n" #cols "k16.f32.bf16.bf16 {" names "}, %" #a_name ", %" #b_name            \
      ", p, 1, 1, 0, 0;\n}\n"                                                                                             \
      : __VA_ARGS__                                                                                                       \
      : "l"(a), "l"(b), "r"(accumulate))

// sums (+)= left right^T: 64 rows by kCols columns, over 16 of the inner dimension. Without `add` what was there is dropped.
template <int kCols>
__device__ __forceinline__ void wgmma(float (&acc)[kCols / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
  static_assert(kCols == 128 || kCols == 160 || kCols == 192 || kCols == 208 || kCols == 256, "no such width");
  if constexpr (kCols == 256) {
    KL_WGMMA(256, KL_REGS_128, 128, 129, 130, KL_ACC_64(0), KL_ACC_64(64));
  } else if constexpr (kCols == 208) {
    KL_WGMMA(208, KL_REGS_104, 104, 105, 106, KL_ACC_64(0), KL_ACC_16(64), KL_ACC_16(80), KL_ACC_4(96), KL_ACC_4(100));
  } else if constexpr (kCols == 192) {
    KL_WGMMA(192, KL_REGS_96, 96, 97, 98, KL_ACC_64(0), KL_ACC_16(64), KL_ACC_16(80));
  } else if constexpr (kCols == 160) {
    KL_WGMMA(160, KL_REGS_80, 80, 81, 82, KL_ACC_64(0), KL_ACC_16(64));
  } else {
    KL_WGMMA(128, KL_REGS_64, 64, 65, 66, KL_ACC_64(0));
  }
}

// All threads of a warpgroup, which is the `group`-th of those that call this.
__device__ __forceinline__ void warpgroup_sync(uint32_t id) { asm volatile("barrier.sync %0, 128;" ::"r"(id) : "memory"); }

// An operand in shared memory whose columns are contiguous: 64 of them are a row of 128 bytes with the 128-byte swizzle, eight rows of
// the inner dimension 1024 bytes after the eight before, the next 64 columns `apart` bytes on.
__device__ __forceinline__ uint64_t wgmma_descriptor_mn_major(uint32_t address, uint32_t stride) {
  return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{stride >> 4} << 16) | ((address & 0x3ffff) >> 4);
}

// sums += left right: 64 rows by 128 columns, over 16 of the inner dimension, with the left operand in registers, as `pack` makes it of
// sums, and the right one as `wgmma_columns` says.
__device__ __forceinline__ void wgmma_rs(float (&acc)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" KL_REGS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : KL_ACC_64(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The calling warpgroup gives registers back, or takes what others gave.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8x8 matrices of 16-bit values from registers to rows of 16 bytes, which the lanes name, eight for each matrix.
__device__ __forceinline__ void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }

__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ float4 load_shared(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
  return v;
}

// ------------------------------------------------------------------------------------------------------------ clusters

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of every block of the cluster arrives, and waits for all others. What they wrote may come later, but for barriers
// (fence_barrier_init): to order it would mean to wait until all of it has reached memory.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync_relaxed() { cluster_arrive(), cluster_wait(); }

// The same, and what they wrote is there.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  cluster_wait();
}

// Stores sixteen bytes at this block's address in another block's shared memory; that block's barrier counts them.
__device__ __forceinline__ void store_remote_async(uint32_t to, float4 v, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%3, %4, %5, %6}, [remote_barrier];\n"
      "}\n" ::"r"(to),
      "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

// Sixteen bits at this block's address in another block's shared memory.
__device__ __forceinline__ uint16_t load_remote(const void* p, uint32_t rank) {
  uint32_t address;
  uint16_t value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

// ------------------------------------------------------------------------------------------------- overlapped launches

// Waits until the kernel before is done and its writes can be seen. Memory is reused at once, so this comes before the first
// read *or write* of global memory.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start as soon as there is room for it.
__device__ __forceinline__ void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
