// The table of emulated kernels, which KL_ENTRY fills before main.
#pragma once

#include <stdint.h>

namespace kl_emu {

struct Kernel {
  const char *module, *symbol;
  uint64_t param_bytes, param_alignment;
  void (*run)(const void* params);
  uint32_t max_threads, shared;
};

// Stands for the dynamic shared memory of a kernel that does not declare its size.
constexpr uint32_t kAnyShared = ~0u;

// A namespace-scope object that registers its kernel. The launch bound after the threads (resident CTAs per SM) does not matter here.
struct Registration {
  Registration(const Kernel& kernel, uint32_t max_threads, uint32_t = 1, uint32_t shared = kAnyShared);
};

}  // namespace kl_emu
