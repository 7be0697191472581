// One wrapper per sm_90 instruction: mbarrier, TMA, wgmma, setmaxnreg, stmatrix, clusters and distributed shared memory, programmatic
// dependent launch. No other file contains inline assembly for them. Shared memory is passed as a 32-bit address (shared_address),
// which takes half as many registers as a pointer.
#pragma once

#include <abi.h>
#include <ptx/sm89.cuh>
#include <ptx/wgmma_descriptor.cuh>

// ----------------------------------------------------------------------------------------- mbarriers and named barriers

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized mbarriers visible to TMA (the async proxy) and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives and announces how many bytes TMA will write before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same mbarrier of another CTA of the cluster. This orders none of the thread's writes: it signals that a stage was read.
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

// Arrives at the mbarrier of another CTA, and announces how many bytes this thread's warp will store there (store_remote_async) before the
// phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx_remote(uint32_t barrier, uint32_t bytes, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %1;\n"
      "}\n" ::"r"(barrier),
      "r"(bytes), "r"(rank)
      : "memory");
}

// Waits until the phase of that parity has completed.
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

// A named barrier between two warpgroups (256 threads): one warpgroup waits in `sync` until the other has called `arrive`, which does
// not block.
__device__ __forceinline__ void named_barrier_sync(uint32_t id) { asm volatile("barrier.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void named_barrier_arrive(uint32_t id) { asm volatile("barrier.arrive %0, 256;" ::"r"(id) : "memory"); }

// ----------------------------------------------------------------------------------------------------------------- TMA

// Loads a box of a matrix into shared memory; `barrier` counts the bytes. The state space is .shared::cta: with .shared::cluster, GPUs
// without multicast would get a subroutine call.
__device__ __forceinline__ void tma_load_2d(uint32_t to, const KlTensorMap* map, int32_t col, int32_t row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map),
      "r"(col), "r"(row), "r"(barrier)
      : "memory");
}

// Loads a box and multicasts it to the same address in every CTA of the cluster that `mask` names; the mbarrier of each counts the bytes.
__device__ __forceinline__ void tma_load_2d_multicast(uint32_t to, const KlTensorMap* map, int32_t col, int32_t row, uint32_t barrier,
                                                      uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(map), "r"(col), "r"(row), "r"(barrier), "h"(mask)
      : "memory");
}

// Loads a box of an image, from (channel, column, line) on. What lies outside of the image, also before its first column or line, is filled
// with zeros.
__device__ __forceinline__ void tma_load_3d(uint32_t to, const KlTensorMap* map, int32_t channel, int32_t column, int32_t line,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map),
      "r"(channel), "r"(column), "r"(line), "r"(barrier)
      : "memory");
}

// Copies consecutive bytes, a multiple of sixteen, to shared memory; `barrier` counts them.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// Stores a box to a matrix, clipped to its edges. The writing threads must have called fence_proxy_async before.
__device__ __forceinline__ void tma_store_2d(const KlTensorMap* map, uint32_t from, int32_t col, int32_t row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(col), "r"(row), "r"(from)
      : "memory");
}

// Stores a box to an image, clipped to its edges.
__device__ __forceinline__ void tma_store_3d(const KlTensorMap* map, uint32_t from, int32_t channel, int32_t column, int32_t line) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(channel), "r"(column), "r"(line), "r"(from)
      : "memory");
}

// Waits until at most kPending stores of this thread have yet to read their boxes from shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's writes to shared memory before reads by TMA.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders writes to global memory before reads by TMA: this thread's writes, and those that it has acquired.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Prefetches a line of global memory into L1.
__device__ __forceinline__ void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p) : "memory"); }

__device__ __forceinline__ void prefetch_tensor_map(const KlTensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---------------------------------------------------------------------------------------------------- warpgroup MMA

// Orders writes to registers before the wgmma instructions that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending committed wgmma groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define KL_REGS_32                                                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, " \
  "%27, %28, %29, %30, %31"
#define KL_REGS_48 KL_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define KL_REGS_64 KL_REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KL_REGS_80 KL_REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define KL_REGS_96 KL_REGS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KL_REGS_104 KL_REGS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define KL_REGS_128                                                                                                                  \
  KL_REGS_104 ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
               "%123, %124, %125, %126, %127"
#define KL_ACC_4(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define KL_ACC_16(i) KL_ACC_4(i), KL_ACC_4(i + 4), KL_ACC_4(i + 8), KL_ACC_4(i + 12)
#define KL_ACC_64(i) KL_ACC_16(i), KL_ACC_16(i + 16), KL_ACC_16(i + 32), KL_ACC_16(i + 48)
#define KL_WGMMA(cols, types, flags, names, a_name, b_name, accumulate_name, ...)                   \
  asm volatile(                                                                                     \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate_name ", 0;\n"                                \
      "wgmma.mma_async.sync.aligned.m64n" #cols types " {" names "}, %" #a_name ", %" #b_name ", p, " \
      flags ";\n}\n"                                                                                \
      : __VA_ARGS__                                                                                 \
      : "l"(a), "l"(b), "r"(accumulate))
// The wgmma for kCols columns. `types` ends its name; `flags` are its signs and, if the element type has them, transpositions.
#define KL_WGMMA_OF_COLS(types, flags)                                                                                              \
  static_assert(kCols == 64 || kCols == 96 || kCols == 128 || kCols == 160 || kCols == 192 || kCols == 208 || kCols == 256,         \
                "no such width");                                                                                                   \
  if constexpr (kCols == 256) {                                                                                                     \
    KL_WGMMA(256, types, flags, KL_REGS_128, 128, 129, 130, KL_ACC_64(0), KL_ACC_64(64));                                           \
  } else if constexpr (kCols == 208) {                                                                                              \
    KL_WGMMA(208, types, flags, KL_REGS_104, 104, 105, 106, KL_ACC_64(0), KL_ACC_16(64), KL_ACC_16(80), KL_ACC_4(96), KL_ACC_4(100)); \
  } else if constexpr (kCols == 192) {                                                                                              \
    KL_WGMMA(192, types, flags, KL_REGS_96, 96, 97, 98, KL_ACC_64(0), KL_ACC_16(64), KL_ACC_16(80));                                \
  } else if constexpr (kCols == 160) {                                                                                              \
    KL_WGMMA(160, types, flags, KL_REGS_80, 80, 81, 82, KL_ACC_64(0), KL_ACC_16(64));                                               \
  } else if constexpr (kCols == 96) {                                                                                               \
    KL_WGMMA(96, types, flags, KL_REGS_48, 48, 49, 50, KL_ACC_16(0), KL_ACC_16(16), KL_ACC_16(32));                                 \
  } else if constexpr (kCols == 128) {                                                                                              \
    KL_WGMMA(128, types, flags, KL_REGS_64, 64, 65, 66, KL_ACC_64(0));                                                              \
  } else {                                                                                                                          \
    KL_WGMMA(64, types, flags, KL_REGS_32, 32, 33, 34, KL_ACC_16(0), KL_ACC_16(16));                                                \
  }

// acc = a b^T, added to acc if `accumulate` is set: 64 rows by kCols columns over 16 of K, both operands in shared memory.
template <int kCols>
__device__ __forceinline__ void wgmma(float (&acc)[kCols / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
  KL_WGMMA_OF_COLS("k16.f32.bf16.bf16", "1, 1, 0, 0")
}

// acc = a b^T over 32 of K, with operands of e4m3. Tensor cores keep thirteen binary places of a sum.
template <int kCols>
__device__ __forceinline__ void wgmma_e4m3(float (&acc)[kCols / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
  KL_WGMMA_OF_COLS("k32.f32.e4m3.e4m3", "1, 1")
}

// acc += a b: as wgmma, with B MN-major.
template <int kCols>
__device__ __forceinline__ void wgmma_mn_major(float (&acc)[kCols / 2], uint64_t a, uint64_t b) {
  constexpr uint32_t accumulate = 1;
  KL_WGMMA_OF_COLS("k16.f32.bf16.bf16", "1, 1, 0, 1")
}

// A named barrier of the 128 threads of one warpgroup.
__device__ __forceinline__ void warpgroup_sync(uint32_t id) { asm volatile("barrier.sync %0, 128;" ::"r"(id) : "memory"); }

// acc += a b: 64 rows by 128, 192 or 256 columns over 16 of K, with A in registers (bf16 pairs in the layout of the accumulators) and B
// MN-major in shared memory. RS as in CUTLASS: register and shared operands.
__device__ __forceinline__ void wgmma_rs(float (&acc)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" KL_REGS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : KL_ACC_64(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_rs(float (&acc)[96], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" KL_REGS_96 "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 1;\n"
               : KL_ACC_64(0), KL_ACC_16(64), KL_ACC_16(80)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_rs(float (&acc)[128], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" KL_REGS_128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
               : KL_ACC_64(0), KL_ACC_64(64)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The calling warpgroup releases registers to the CTA's pool, or acquires some from it.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores four 8x8 matrices of 16-bit values to shared memory; lanes 8 i to 8 i + 7 supply the row addresses of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_shared_pair(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_shared_words(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
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

// Every thread of every CTA of the cluster arrives and waits for the others. The arrival is relaxed: it orders only the initialization of
// mbarriers (fence_mbarrier_init), because a release would wait until all earlier writes have reached memory.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync_relaxed() { cluster_arrive(), cluster_wait(); }

// A cluster barrier that also makes earlier writes visible.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  cluster_wait();
}

// Stores 16 bytes to another CTA's shared memory (distributed shared memory), at the address that corresponds to `to` in this CTA. The
// other CTA's mbarrier counts the bytes.
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

// Stores words or a single number to another CTA's shared memory.
__device__ __forceinline__ void store_remote_async(uint32_t to, uint4 v, uint32_t barrier, uint32_t rank) {
  const float4 same = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
  store_remote_async(to, same, barrier, rank);
}
__device__ __forceinline__ void store_remote_async(uint32_t to, float v, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %3, [remote_barrier];\n"
      "}\n" ::"r"(to),
      "r"(barrier), "r"(rank), "f"(v)
      : "memory");
}

// Loads 16 bits from another CTA's shared memory, at the address that corresponds to `p` in this CTA.
__device__ __forceinline__ uint16_t load_remote(const void* p, uint32_t rank) {
  uint32_t address;
  uint16_t value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

// --------------------------------------------------------------------------------------- programmatic dependent launch

// Waits until the previous kernel in the stream has finished and its writes are visible. Workspace memory is reused at once, so this
// comes before the first read *or write* of global memory.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allows the next kernel in the stream to start as soon as SMs have room for it.
__device__ __forceinline__ void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
