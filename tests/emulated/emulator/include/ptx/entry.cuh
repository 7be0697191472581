// The emulator's way to declare a kernel and its shared memory. kernels/ptx/entry.cuh has the GPU's.
#pragma once

#include <builtins.h>

#include "../../kernel_table.h"

namespace kl_emu {

void* static_shared(const void* key, uint32_t bytes, uint32_t alignment);
__attribute__((const)) unsigned char* dynamic_shared_memory();

template <class T>
T& static_shared(const void* key, uint32_t alignment) {
  return *static_cast<T*>(static_shared(key, sizeof(T), alignment < alignof(T) ? alignof(T) : alignment));
}

}  // namespace kl_emu

// A kernel is a function of this file, which registers it under the name of its module.
#define KL_ENTRY(name, Params, ...)                                                                                                    \
  void name(const Params& p);                                                                                                          \
  const ::kl_emu::Registration name##_registration{                                                                                    \
      {KL_EMULATED_MODULE, #name, sizeof(Params), alignof(Params), [](const void* p) { name(*static_cast<const Params*>(p)); }, 0, 0},  \
      __VA_ARGS__};                                                                                                                    \
  void name(const Params& p)
#define KL_TILE_ENTRY(name, Params, Config, ctas_per_sm) KL_ENTRY(name, Params, Config::kThreads, ctas_per_sm, Config::kSharedBytes)

// The address of `name_key` identifies the variable: it differs in each function and each template instantiation.
#define KL_SHARED(type, name, bounds) KL_SHARED_ALIGNED(1, type, name, bounds)
#define KL_SHARED_ALIGNED(alignment, type, name, bounds) \
  static char name##_key;                                \
  auto& name = ::kl_emu::static_shared<std::remove_reference_t<type bounds>>(&name##_key, alignment)

#define KL_DYNAMIC_SHARED(alignment) static_assert(1024 % (alignment) == 0, "dynamic shared memory is aligned to 1024 bytes")
#define dynamic_shared (::kl_emu::dynamic_shared_memory())
