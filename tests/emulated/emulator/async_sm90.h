// The bodies of the sm_90 instructions that include/ptx/sm90.cuh calls.
#pragma once

#include <stdint.h>

namespace kl_emu {
namespace ptx {

void mbarrier_init(uint32_t address, uint32_t arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(uint32_t address);
void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes);
void mbarrier_arrive_remote(uint32_t address, uint32_t rank);
void mbarrier_arrive_expect_tx_remote(uint32_t barrier, uint32_t bytes, uint32_t rank);
void mbarrier_wait(uint32_t address, uint32_t parity);

// Copies a box of a matrix (rank 2, z is 0) or of a rank-3 tensor. `mask` names the CTAs of the cluster that get it; 0 is the calling CTA.
void tma_load(uint32_t to, const void* map, uint32_t rank, int32_t x, int32_t y, int32_t z, uint32_t barrier, uint32_t mask);
void tma_store(const void* map, uint32_t from, uint32_t rank, int32_t x, int32_t y, int32_t z);
void tma_store_wait(uint32_t pending);
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void fence_proxy_async();

// A wgmma with `cols` columns over 16 of K. A is a descriptor, or four registers per thread if `a_registers` is not null. B is K-major or
// MN-major.
void wgmma(float* acc, uint32_t cols, uint64_t a, const uint32_t* a_registers, uint64_t b, bool b_mn_major, bool accumulate);
// A wgmma over 32 of K with e4m3 elements, both operands K-major in shared memory.
void wgmma_e4m3(float* acc, uint32_t cols, uint64_t a, uint64_t b, bool accumulate);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(uint32_t pending);

// Accesses to 4 or 16 bytes of shared memory, aligned to their size.
void store_shared(uint32_t to, const void* from, uint32_t bytes);
void load_shared(uint32_t from, void* to, uint32_t bytes);

void named_barrier_sync(uint32_t id, uint32_t threads);
void named_barrier_arrive(uint32_t id, uint32_t threads);

void setmaxnreg(uint32_t registers, bool increase);
void stmatrix_x4(uint32_t row, const uint32_t (&words)[4]);

uint32_t cluster_rank();
void cluster_arrive(bool release);
void cluster_wait();
void store_remote_async(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t rank);
uint16_t load_remote(const void* p, uint32_t rank);

void wait_for_previous_kernel();
void launch_next_kernel();

}  // namespace ptx
}  // namespace kl_emu
