// The instructions of sm_80 for the emulator: kernels/ptx/sm80.cuh has the other body of each, and says what it does.
#pragma once

#include <cuda_bf16.h>

#include <ptx/entry.cuh>

namespace kl_emu {
void wait_for_copies(uint32_t pending);
}

uint32_t shared_address(const void* p);
void store_release(uint32_t* to, uint32_t v);
uint32_t load_acquire(const uint32_t* from);
inline float4 load_uncached(const float4* from) { return __ldcg(from); }
inline uint4 load_now(const void* from) { return *static_cast<const uint4*>(from); }
float exp2_approx(float v);

void cp_async(uint32_t to, const void* from, bool valid);
void cp_async_commit();
template <int kPending>
void cp_async_wait() {
  kl_emu::wait_for_copies(kPending);
}

void ldmatrix_x4(uint32_t (&r)[4], uint32_t address);
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address);
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
