// The emulator's bodies of sm_80 instructions. kernels/ptx/sm80.cuh has the GPU's, and says what each one does.
#pragma once

#include <cuda_bf16.h>

#include <ptx/entry.cuh>

namespace kl_emu {
void wait_for_copies(uint32_t pending);
}

uint32_t shared_address(const void* p);
void store_release(uint32_t* to, uint32_t v);
void add_release(uint32_t* to, uint32_t v);
uint32_t load_acquire(const uint32_t* from);
inline float4 load_uncached(const float4* from) { return __ldcg(from); }
inline uint4 load_now(const void* from) { return *static_cast<const uint4*>(from); }
float exp2_approx(float v);

template <uint32_t kSelector>
uint32_t permute_bytes(uint32_t v) {
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t choice = kSelector >> 4 * i & 15;
    // The other word that the instruction can choose from is zero.
    const uint32_t byte = choice % 8 < 4 ? v >> choice % 8 * 8 & 0xff : 0;
    result |= (choice < 8 ? byte : byte < 0x80 ? 0 : 0xff) << 8 * i;
  }
  return result;
}

template <uint32_t kSelector>
uint32_t permute_bytes(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t choice = kSelector >> 4 * i & 7;
    result |= ((choice < 4 ? a : b) >> choice % 4 * 8 & 0xff) << 8 * i;
  }
  return result;
}

inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  // Products of two values with eight significant bits are exact in f32.
  const auto product = [](uint32_t a, uint32_t b) -> uint32_t {
    return __float2bfloat16_rn(__uint_as_float(a << 16) * __uint_as_float(b << 16)).bits;
  };
  return product(a & 0xffff, b & 0xffff) | product(a >> 16, b >> 16) << 16;
}
void cp_async(uint32_t to, const void* from, bool valid);
void cp_async_commit();
template <int kPending>
void cp_async_wait() {
  kl_emu::wait_for_copies(kPending);
}

void ldmatrix_x4(uint32_t (&r)[4], uint32_t address);
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address);
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
