// Runs the emulator's block-scaled MMAs and the software of ptx/block_scaled_mma.cuh, which replaces them on GPUs that lack the
// instructions. block_scaled.rs compares the results.
#include <abi.h>
#include <ptx/sm120.cuh>

#define __noinline__ __attribute__((noinline))
namespace software {
#include <ptx/block_scaled_mma.cuh>
}

struct FragmentParams {
  uint64_t fragments, by_instruction, in_software, count;
};

// The operands of a lane.
struct Fragment {
  uint32_t a[4], b[2], scales_a, scales_b;
  float d[4];
};

// Calls f(operands, instruction's results, software's results) for each MMA. A lane has four results of an MMA.
template <int kResults, class F>
void for_each_mma(const FragmentParams& p, F f) {
  for (uint64_t i = 0; i < p.count; i++) {
    const uint64_t at = i * 32 + threadIdx.x;
    const Fragment fragment = reinterpret_cast<const Fragment*>(p.fragments)[at];
    float* results[] = {reinterpret_cast<float*>(p.by_instruction), reinterpret_cast<float*>(p.in_software)};
    f(fragment, results[0] + at * 4 * kResults, results[1] + at * 4 * kResults);
  }
}

template <int kSelectors>
void multiply_nvf4(const Fragment& of, float* by_instruction, float* in_software) {
  constexpr int kA = kSelectors / 4, kB = kSelectors % 4;
  float d[4], e[4];
  for (int i = 0; i < 4; i++) d[i] = e[i] = of.d[i];
  mma_nvf4<kA, kB>(d, of.a, of.b[0], of.b[1], of.scales_a, of.scales_b);
  software::mma_nvf4<kA, kB>(e, of.a, of.b[0], of.b[1], of.scales_a, of.scales_b);
  for (int i = 0; i < 4; i++) by_instruction[4 * kSelectors + i] = d[i], in_software[4 * kSelectors + i] = e[i];
  if constexpr (kSelectors > 0) multiply_nvf4<kSelectors - 1>(of, by_instruction, in_software);
}

// Multiplies with every pair of selectors.
KL_ENTRY(both_nvf4, FragmentParams, 32) { for_each_mma</*results*/ 8>(p, multiply_nvf4<7>); }

KL_ENTRY(both_e4m3, FragmentParams, 32) {
  for_each_mma</*results*/ 1>(p, [](const Fragment& of, float* by_instruction, float* in_software) {
    float d[4], e[4];
    for (int i = 0; i < 4; i++) d[i] = e[i] = of.d[i];
    mma_e4m3_scaled(d, of.a, of.b[0], of.b[1]);
    software::mma_e4m3_scaled(e, of.a, of.b[0], of.b[1]);
    for (int i = 0; i < 4; i++) by_instruction[i] = d[i], in_software[i] = e[i];
  });
}
