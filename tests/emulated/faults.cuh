// Shared by the kernels that break rules. They are launched with a cluster of two CTAs of two warpgroups, and may overlap with the
// preceding kernel.
#pragma once

#include <abi.h>
#include <ptx/sm90.cuh>

constexpr uint32_t kLanes = 32, kAllLanes = 0xffffffffu, kWarpgroup = 128, kThreads = 256;
// Sizes of dynamic shared memory and of the allocation at `data`. The allocation holds zeros except for the word kSetWord.
constexpr uint32_t kSharedBytes = 48 << 10, kDataBytes = 64 << 10, kSetWord = 64;

struct FaultParams {
  // 64 x 64 bf16 values at `data`, in boxes of 8 rows with the 128-byte swizzle.
  KlTensorMap map;
  uint64_t data;
  uint32_t faulty;  // 0 to keep the rule, otherwise which way to break it
};

#define KL_FAULT(name) KL_ENTRY(name, FaultParams, kThreads)

KL_DYNAMIC_SHARED(1024);

// Volatile, so that the compiler keeps loads with unused values.
inline volatile uint32_t* shared_words() { return reinterpret_cast<volatile uint32_t*>(dynamic_shared + 0); }
