// Data that CTAs of a launch pass to each other through global memory: stored past L1, published by a release of a flag, loaded past L1
// after an acquire of it. Loads that no release and acquire order after the store are races.
#pragma once

#include <stdint.h>

namespace kl_emu {

// By __stcg, and by __ldcg and load_uncached.
void note_uncached_store(const void* address, uint32_t bytes);
void check_uncached_load(const void* address, uint32_t bytes);

// By st.release and ld.acquire.
void note_release(const void* flag, uint32_t value);
void note_acquire(const void* flag, uint32_t value);

}  // namespace kl_emu
