#include "async_publication.h"

#include <string.h>

#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace kl_emu {
namespace {

constexpr uint64_t kGranule = 16;

struct Publications {
  // A store to sixteen bytes: the warp that made it, and the time of the warp's clock.
  struct Store {
    uint32_t cluster, agent, time;
  };
  // The clocks of the warps that released a flag, by cluster.
  struct Flag {
    uint32_t value = 0;
    std::map<uint32_t, Clock> clocks;
  };
  // The last stores to each granule, all of the same bytes.
  std::unordered_map<uint64_t, std::vector<Store>> stores;
  // The range of granules that stores have reached.
  uint64_t first = ~uint64_t{0}, last = 0;
  std::unordered_map<const void*, Flag> flags;
  // The clock that a CTA (its cluster and rank) has acquired from another cluster.
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, Clock> acquired;
  // The threads that have acquired something since their last fence.
  std::map<const Thread*, bool> unfenced;
};

Publications& publications() { return extension<Publications>(current_cluster().launch->publications); }

bool is_ordered(const Publications& all, const Warp& warp, const Publications::Store& store) {
  const Clock* known = &warp.clock;
  if (store.cluster != warp.cta->cluster->index) {
    const auto acquired = all.acquired.find({warp.cta->cluster->index, warp.cta->rank, store.cluster});
    known = acquired == all.acquired.end() ? nullptr : &acquired->second;
  }
  return known && known->time[store.agent] >= store.time;
}

// Calls found() for each granule that was stored to.
template <class Found>
void check_load(const void* address, uint32_t bytes, Found found) {
  Publications& all = publications();
  const Warp& warp = current_warp();
  const uint64_t first = reinterpret_cast<uint64_t>(address);
  if (bytes == 0 || (first + bytes - 1) / kGranule < all.first || first / kGranule > all.last) return;
  for (uint64_t at = first / kGranule; at * kGranule < first + bytes; at++) {
    const auto stores = all.stores.find(at);
    if (stores == all.stores.end()) continue;
    found();
    bool ordered = false;
    for (const Publications::Store& store : stores->second) ordered |= is_ordered(all, warp, store);
    const auto [cluster, agent, time] = stores->second.front();
    const uint32_t warps = static_cast<uint32_t>(warp.cta->warps.size());
    KL_EMU_CHECK(ordered,
                 "race: loads global memory that warp %u of CTA %u in cluster %u stored, without an acquire of what that warp has released",
                 agent % warps, agent / warps, cluster);
  }
}

}  // namespace

void note_uncached_store(const void* address, const void* value, uint32_t bytes) {
  Publications& all = publications();
  const Warp& warp = current_warp();
  const Publications::Store store = {warp.cta->cluster->index, warp.agent, warp.clock.time[warp.agent]};
  const bool same = memcmp(address, value, bytes) == 0;
  const uint64_t first = reinterpret_cast<uint64_t>(address);
  for (uint64_t at = first / kGranule; at * kGranule < first + bytes; at++) {
    std::vector<Publications::Store>& stores = all.stores[at];
    if (!same) stores.clear();
    stores.push_back(store);
    all.first = std::min(all.first, at), all.last = std::max(all.last, at);
  }
}

void check_uncached_load(const void* address, uint32_t bytes) {
  check_load(address, bytes, [] {});
}

void check_tma_load(const void* address, uint32_t bytes) {
  check_load(address, bytes, [] {
    KL_EMU_CHECK(!publications().unfenced[&current()],
                 "TMA loads global memory that another thread stored, without fence_proxy_async_global after the acquire");
  });
}

void note_release(const void* flag, uint32_t value) {
  Publications::Flag& released = publications().flags[flag];
  released.value = value, released.clocks.clear();
  release_to(released.clocks[current_cluster().index]);
}

void note_release_add(const void* flag, uint32_t value) {
  Publications::Flag& released = publications().flags[flag];
  released.value += value;
  Clock clock;
  release_to(clock);
  released.clocks[current_cluster().index].join(clock);
}

void note_acquire(const void* flag, uint32_t value) {
  if (value == 0) return;
  Publications& all = publications();
  const auto found = all.flags.find(flag);
  KL_EMU_CHECK(found != all.flags.end() && found->second.value == value,
               "ld.acquire reads %u from a flag to which no CTA of this launch has released that: it was not reset", value);
  const Cta& cta = current_cta();
  for (const auto& [cluster, clock] : found->second.clocks) {
    if (cluster == cta.cluster->index) {
      acquire_from(clock);
    } else {
      all.acquired[{cta.cluster->index, cta.rank, cluster}].join(clock);
    }
  }
  all.unfenced[&current()] = true;
}

void note_proxy_fence_global() { publications().unfenced[&current()] = false; }

}  // namespace kl_emu
