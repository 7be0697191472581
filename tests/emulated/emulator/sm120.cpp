// The instructions of sm_120: mma.sync with block scales.
#include "include/ptx/sm120.cuh"

#include <string.h>

#include "arithmetic.h"
#include "machine.h"

using namespace kl_emu;

namespace {

struct ScaledMma {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
  uint32_t scales_a, scales_b;
  int select_a, select_b;
};

void check_capability(const char* instruction) {
  const uint32_t capability = current_cta().cluster->launch->shape.capability;
  KL_EMU_CHECK(capability >= 120 && capability < 130, "%s on a GPU of compute capability %u", instruction, capability);
}

void multiply(void* const* lanes, uint32_t) {
  check_capability("mma.nvf4");
  uint8_t a[16][32], b[8][32], scales_a[16][4], scales_b[8][4];
  float d[16][8];
  for (uint32_t lane = 0; lane < kLanes; lane++) {
    const ScaledMma& own = *static_cast<const ScaledMma*>(lanes[lane]);
    const uint32_t row = lane / 4, at = lane % 4 * 4;
    for (uint32_t i = 0; i < 4; i++) memcpy(&a[row + i % 2 * 8][at + i / 2 * 16], &own.a[i], sizeof(own.a[i]));
    for (uint32_t i = 0; i < 2; i++) memcpy(&b[row][at + i * 16], &own.b[i], sizeof(own.b[i]));
    if (static_cast<int>(lane % 4 / 2) == own.select_a) memcpy(scales_a[row + lane % 2 * 8], &own.scales_a, 4);
    if (static_cast<int>(lane % 4) == own.select_b) memcpy(scales_b[row], &own.scales_b, 4);
    for (uint32_t e = 0; e < 4; e++) d[row + e / 2 * 8][lane % 4 * 2 + e % 2] = own.d[e];
  }
  mma_multiply_nvf4(16, 8, a[0], b[0], scales_a[0], scales_b[0], d[0]);
  for (uint32_t lane = 0; lane < kLanes; lane++) {
    const ScaledMma& own = *static_cast<const ScaledMma*>(lanes[lane]);
    for (uint32_t e = 0; e < 4; e++) own.d[e] = d[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
  }
}

}  // namespace

void kl_emu::ptx::mma_nvf4(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scales_a, uint32_t scales_b,
                           int select_a, int select_b) {
  ScaledMma own{d, a, {b0, b1}, scales_a, scales_b, select_a, select_b};
  warp_collective("mma.nvf4", kAllLanes, &own, multiply);
}

// With scales of one this is the plain instruction.
void mma_e4m3_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  check_capability("mma.e4m3 with scales");
  mma_e4m3(d, a, b0, b1);
}
