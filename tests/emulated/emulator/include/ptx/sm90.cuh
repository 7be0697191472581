// The emulator's bodies of the wrappers in kernels/ptx/sm90.cuh, which this file replaces.
#pragma once

#include <abi.h>
#include <ptx/sm89.cuh>
#include <ptx/wgmma_descriptor.cuh>

#include "../../async_sm90.h"

// ----------------------------------------------------------------------------------------- mbarriers and named barriers

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) { kl_emu::ptx::mbarrier_init(barrier, arrivals); }
inline void fence_mbarrier_init() { kl_emu::ptx::fence_mbarrier_init(); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) { kl_emu::ptx::mbarrier_arrive_expect_tx(barrier, bytes); }
inline void mbarrier_arrive(uint32_t barrier) { kl_emu::ptx::mbarrier_arrive(barrier); }
inline void mbarrier_arrive_remote(uint32_t barrier, uint32_t rank) { kl_emu::ptx::mbarrier_arrive_remote(barrier, rank); }
inline void mbarrier_arrive_expect_tx_remote(uint32_t barrier, uint32_t bytes, uint32_t rank) {
  kl_emu::ptx::mbarrier_arrive_expect_tx_remote(barrier, bytes, rank);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { kl_emu::ptx::mbarrier_wait(barrier, parity); }

inline void named_barrier_sync(uint32_t id) { kl_emu::ptx::named_barrier_sync(id, 256); }
inline void named_barrier_arrive(uint32_t id) { kl_emu::ptx::named_barrier_arrive(id, 256); }
inline void warpgroup_sync(uint32_t id) { kl_emu::ptx::named_barrier_sync(id, 128); }

// ----------------------------------------------------------------------------------------------------------------- TMA

inline void tma_load_2d(uint32_t to, const KlTensorMap* map, int32_t col, int32_t row, uint32_t barrier) {
  kl_emu::ptx::tma_load(to, map, 2, col, row, 0, barrier, 0);
}
inline void tma_load_2d_multicast(uint32_t to, const KlTensorMap* map, int32_t col, int32_t row, uint32_t barrier, uint16_t mask) {
  kl_emu::ptx::tma_load(to, map, 2, col, row, 0, barrier, mask);
}
inline void tma_load_3d(uint32_t to, const KlTensorMap* map, int32_t x, int32_t y, int32_t z, uint32_t barrier) {
  kl_emu::ptx::tma_load(to, map, 3, x, y, z, barrier, 0);
}
inline void tma_load_3d_multicast(uint32_t to, const KlTensorMap* map, int32_t x, int32_t y, int32_t z, uint32_t barrier, uint16_t mask) {
  kl_emu::ptx::tma_load(to, map, 3, x, y, z, barrier, mask);
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) { kl_emu::ptx::bulk_load(to, from, bytes, barrier); }
inline void tma_store_2d(const KlTensorMap* map, uint32_t from, int32_t col, int32_t row) {
  kl_emu::ptx::tma_store(map, from, 2, col, row, 0);
}
inline void tma_store_3d(const KlTensorMap* map, uint32_t from, int32_t x, int32_t y, int32_t z) {
  kl_emu::ptx::tma_store(map, from, 3, x, y, z);
}
template <int kPending>
inline void tma_store_wait() {
  kl_emu::ptx::tma_store_wait(kPending);
}
inline void fence_proxy_async() { kl_emu::ptx::fence_proxy_async(); }
inline void fence_proxy_async_global() { kl_emu::note_proxy_fence_global(); }
inline void prefetch_l1(const void*) {}
inline void prefetch_tensor_map(const KlTensorMap*) {}

// ---------------------------------------------------------------------------------------------------- warpgroup MMA

inline void wgmma_fence() { kl_emu::ptx::wgmma_fence(); }
inline void wgmma_commit() { kl_emu::ptx::wgmma_commit(); }
template <int kPending>
inline void wgmma_wait() {
  kl_emu::ptx::wgmma_wait(kPending);
}

template <int kCols>
inline void wgmma(float (&acc)[kCols / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
  static_assert(kCols % 8 == 0 && kCols <= 256, "no such width");
  kl_emu::ptx::wgmma(acc, kCols, a, nullptr, b, false, accumulate != 0);
}
template <int kCols>
inline void wgmma_e4m3(float (&acc)[kCols / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
  static_assert(kCols % 8 == 0 && kCols <= 256, "no such width");
  kl_emu::ptx::wgmma_e4m3(acc, kCols, a, b, accumulate != 0);
}
template <int kCols>
inline void wgmma_mn_major(float (&acc)[kCols / 2], uint64_t a, uint64_t b) {
  static_assert(kCols % 8 == 0 && kCols <= 256, "no such width");
  kl_emu::ptx::wgmma(acc, kCols, a, nullptr, b, true, true);
}
inline void wgmma_rs(float (&acc)[64], const uint32_t* a, uint64_t b) { kl_emu::ptx::wgmma(acc, 128, 0, a, b, true, true); }
inline void wgmma_rs(float (&acc)[96], const uint32_t* a, uint64_t b) { kl_emu::ptx::wgmma(acc, 192, 0, a, b, true, true); }
inline void wgmma_rs(float (&acc)[128], const uint32_t* a, uint64_t b) { kl_emu::ptx::wgmma(acc, 256, 0, a, b, true, true); }

template <int kRegisters>
inline void setmaxnreg_dec() {
  kl_emu::ptx::setmaxnreg(kRegisters, false);
}
template <int kRegisters>
inline void setmaxnreg_inc() {
  kl_emu::ptx::setmaxnreg(kRegisters, true);
}

inline void stmatrix_x4(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) { kl_emu::ptx::stmatrix_x4(row, {a, b, c, d}); }
inline void store_shared(uint32_t to, uint32_t v) { kl_emu::ptx::store_shared(to, &v, sizeof(v)); }
inline void store_shared(uint32_t to, uint2 v) { kl_emu::ptx::store_shared(to, &v, sizeof(v)); }
inline void store_shared(uint32_t to, uint4 v) { kl_emu::ptx::store_shared(to, &v, sizeof(v)); }
inline uint32_t load_shared_word(uint32_t from) {
  uint32_t v;
  kl_emu::ptx::load_shared(from, &v, sizeof(v));
  return v;
}
inline uint2 load_shared_pair(uint32_t from) {
  uint2 v;
  kl_emu::ptx::load_shared(from, &v, sizeof(v));
  return v;
}
inline uint4 load_shared_words(uint32_t from) {
  uint4 v;
  kl_emu::ptx::load_shared(from, &v, sizeof(v));
  return v;
}
inline float4 load_shared(uint32_t from) {
  float4 v;
  kl_emu::ptx::load_shared(from, &v, sizeof(v));
  return v;
}

// ------------------------------------------------------------------------------------------------------------ clusters

inline uint32_t cluster_rank() { return kl_emu::ptx::cluster_rank(); }
inline void cluster_arrive() { kl_emu::ptx::cluster_arrive(false); }
inline void cluster_wait() { kl_emu::ptx::cluster_wait(); }
inline void cluster_sync_relaxed() { cluster_arrive(), cluster_wait(); }
inline void cluster_sync() { kl_emu::ptx::cluster_arrive(true), cluster_wait(); }
inline void store_remote_async(uint32_t to, float4 v, uint32_t barrier, uint32_t rank) {
  kl_emu::ptx::store_remote_async(to, &v, sizeof(v), barrier, rank);
}
inline void store_remote_async(uint32_t to, uint4 v, uint32_t barrier, uint32_t rank) {
  kl_emu::ptx::store_remote_async(to, &v, sizeof(v), barrier, rank);
}
inline void store_remote_async(uint32_t to, float v, uint32_t barrier, uint32_t rank) {
  kl_emu::ptx::store_remote_async(to, &v, sizeof(v), barrier, rank);
}
inline uint16_t load_remote(const void* p, uint32_t rank) { return kl_emu::ptx::load_remote(p, rank); }

// --------------------------------------------------------------------------------------- programmatic dependent launch

inline void wait_for_previous_kernel() { kl_emu::ptx::wait_for_previous_kernel(); }
inline void launch_next_kernel() { kl_emu::ptx::launch_next_kernel(); }
