// Data that CTAs of a launch pass to each other through global memory. A store goes past L1 and is published by releasing a flag. The load,
// past L1 or by TMA, follows an acquire of that flag. Loads without such an order are races. Warps may store the same bytes to the same
// place; then it suffices that one of the stores is ordered before the load.
#pragma once

#include <stdint.h>

namespace kl_emu {

// Called by __stcg before it stores `value`, and by __ldcg and load_uncached.
void note_uncached_store(const void* address, const void* value, uint32_t bytes);
void check_uncached_load(const void* address, uint32_t bytes);
// Called by TMA, which sees such stores only after a fence that follows the acquire.
void check_tma_load(const void* address, uint32_t bytes);

// Called by st.release, red.release and ld.acquire.
void note_release(const void* flag, uint32_t value);
void note_release_add(const void* flag, uint32_t value);
void note_acquire(const void* flag, uint32_t value);
void note_proxy_fence_global();

}  // namespace kl_emu
