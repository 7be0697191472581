#include "async_publication.h"

#include <tuple>
#include <unordered_map>

#include "machine.h"

namespace kl_emu {
namespace {

constexpr uint64_t kGranule = 16;

struct Publications {
  // The last store to sixteen bytes: by a warp, at a time of its clock.
  struct Store {
    uint32_t cluster, agent, time;
  };
  // What the warp that released a flag knew of its cluster.
  struct Flag {
    uint32_t cluster, value;
    Clock clock;
  };
  std::unordered_map<uint64_t, Store> stores;
  std::unordered_map<const void*, Flag> flags;
  // What a CTA (its cluster and rank) has acquired of another cluster.
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, Clock> acquired;
};

Publications& publications() { return extension<Publications>(current_cluster().launch->publications); }

}  // namespace

void note_uncached_store(const void* address, uint32_t bytes) {
  const Warp& warp = current_warp();
  const Publications::Store store = {warp.cta->cluster->index, warp.agent, warp.clock.time[warp.agent]};
  const uint64_t first = reinterpret_cast<uint64_t>(address);
  for (uint64_t at = first / kGranule; at * kGranule < first + bytes; at++) publications().stores[at] = store;
}

void check_uncached_load(const void* address, uint32_t bytes) {
  Publications& all = publications();
  const Warp& warp = current_warp();
  const uint64_t first = reinterpret_cast<uint64_t>(address);
  for (uint64_t at = first / kGranule; at * kGranule < first + bytes; at++) {
    const auto found = all.stores.find(at);
    if (found == all.stores.end()) continue;
    const auto [cluster, agent, time] = found->second;
    const Clock* known = &warp.clock;
    if (cluster != warp.cta->cluster->index) {
      const auto acquired = all.acquired.find({warp.cta->cluster->index, warp.cta->rank, cluster});
      known = acquired == all.acquired.end() ? nullptr : &acquired->second;
    }
    const uint32_t warps = static_cast<uint32_t>(warp.cta->warps.size());
    KL_EMU_CHECK(known && known->time[agent] >= time,
                 "race: loads global memory that warp %u of CTA %u in cluster %u stored, without an acquire of what that warp has released",
                 agent % warps, agent / warps, cluster);
  }
}

void note_release(const void* flag, uint32_t value) {
  Clock clock;
  release_to(clock);
  publications().flags[flag] = {current_cluster().index, value, clock};
}

void note_acquire(const void* flag, uint32_t value) {
  if (value == 0) return;
  Publications& all = publications();
  const auto found = all.flags.find(flag);
  KL_EMU_CHECK(found != all.flags.end() && found->second.value == value,
               "ld.acquire reads %u from a flag to which no CTA of this launch has released that: it was not reset", value);
  const Cta& cta = current_cta();
  all.acquired[{cta.cluster->index, cta.rank, found->second.cluster}].join(found->second.clock);
}

}  // namespace kl_emu
