// Data that CTAs of a launch pass to each other through global memory: stored past L1, published by a release of a flag, loaded past L1 or
// by TMA after an acquire of it. Loads that no release and acquire order after the store are races. Warps may store the same bytes to the
// same place; then it suffices that one of them is ordered before the load.
#pragma once

#include <stdint.h>

namespace kl_emu {

// By __stcg, before it stores `value`, and by __ldcg and load_uncached.
void note_uncached_store(const void* address, const void* value, uint32_t bytes);
void check_uncached_load(const void* address, uint32_t bytes);
// By TMA, which sees such stores only after a fence behind the acquire.
void check_tma_load(const void* address, uint32_t bytes);

// By st.release, red.release and ld.acquire.
void note_release(const void* flag, uint32_t value);
void note_release_add(const void* flag, uint32_t value);
void note_acquire(const void* flag, uint32_t value);
void note_proxy_fence_global();

}  // namespace kl_emu
