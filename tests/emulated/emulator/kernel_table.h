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

// The dynamic shared memory of a kernel that does not say how much it takes.
constexpr uint32_t kAnyShared = ~0u;

// An object of namespace scope that enters its kernel. The launch bounds after the threads (resident CTAs per SM) do not matter here.
struct Registration {
  Registration(const Kernel& kernel, uint32_t max_threads, uint32_t = 1, uint32_t shared = kAnyShared);
};

}  // namespace kl_emu
