// Meetings of threads: the collectives of a warp and the barriers of a CTA.
#include <string.h>

#include "include/builtins.h"
#include "machine.h"

namespace kl_emu {

void warp_collective(const char* operation, uint32_t mask, void* argument, void (*combine)(void* const* lanes, uint32_t mask)) {
  Thread& thread = current();
  Warp& warp = *thread.warp;
  Meeting& meeting = warp.meeting;
  KL_EMU_CHECK(mask >> thread.lane & 1, "%s with mask 0x%08x, which does not name the calling lane", operation, mask);
  KL_EMU_CHECK(!(mask & warp.exited), "%s with mask 0x%08x, but lanes 0x%08x have exited", operation, mask, mask & warp.exited);
  if (!meeting.operation) {
    meeting.operation = operation, meeting.combine = combine, meeting.mask = mask, meeting.arrived = 0;
  }
  KL_EMU_CHECK(meeting.combine == combine && meeting.mask == mask,
               "%s with mask 0x%08x, while lanes 0x%08x of the warp wait in %s with mask 0x%08x", operation, mask, meeting.arrived,
               meeting.operation, meeting.mask);
  meeting.arrived |= 1u << thread.lane;
  meeting.arguments[thread.lane] = argument;
  if (meeting.arrived != mask) {
    block(
        meeting.waiting,
        [](const void* context) {
          const Meeting& m = *static_cast<const Meeting*>(context);
          return format("%s, for lanes 0x%08x", m.operation, m.mask & ~m.arrived);
        },
        &meeting);
    return;
  }
  combine(meeting.arguments.data(), mask);
  meeting.operation = nullptr;
  wake_all(meeting.waiting);
}

// ---------------------------------------------------------------------------------------------------------------- barriers

namespace {

// Arrives at a barrier. True if this arrival completes it.
bool arrive(NamedBarrier& barrier, uint32_t id, uint32_t count) {
  const Thread& thread = current();
  KL_EMU_CHECK(count > 0 && count % kLanes == 0 && count <= thread.cta->threads,
               "barrier %u for %u threads; the CTA has %u, and a barrier counts whole warps", id, count, thread.cta->threads);
  if (barrier.arrived == 0) barrier.count = count;
  KL_EMU_CHECK(barrier.count == count, "barrier %u for %u threads, at which others have arrived for %u", id, count, barrier.count);
  uint32_t& lanes = barrier.lanes[thread.warp->index];
  KL_EMU_CHECK(!(lanes >> thread.lane & 1), "arrives twice at barrier %u before it completes", id);
  lanes |= 1u << thread.lane;
  if (lanes == kAllLanes) release_to(barrier.gathered);
  if (++barrier.arrived < barrier.count) return false;
  for (uint32_t warp = 0; warp < barrier.lanes.size(); warp++) {
    KL_EMU_CHECK(barrier.lanes[warp] == 0 || barrier.lanes[warp] == kAllLanes,
                 "barrier %u completes with lanes 0x%08x of warp %u; whole warps must arrive", id, barrier.lanes[warp], warp);
  }
  barrier.lanes = {};
  barrier.arrived = 0;
  barrier.result = barrier.reduced, barrier.reduced = false;
  barrier.published = barrier.gathered, barrier.gathered = {};
  barrier.generation++;
  wake_all(barrier.waiting);
  return true;
}

NamedBarrier& barrier_of(uint32_t id) {
  KL_EMU_CHECK(id < kNamedBarriers, "barrier %u; there are %u", id, kNamedBarriers);
  return current_cta().barriers[id];
}

}  // namespace

void barrier_arrive(uint32_t id, uint32_t count) { arrive(barrier_of(id), id, count); }

void barrier_sync(uint32_t id, uint32_t count) {
  const Cta& cta = current_cta();
  NamedBarrier& barrier = barrier_of(id);
  const uint64_t generation = barrier.generation;
  if (!arrive(barrier, id, count)) {
    wait_until(
        barrier.waiting, [&] { return barrier.generation != generation; },
        [&] {
          const std::string gone = cta.running < cta.threads ? format(", and %u have exited", cta.threads - cta.running) : "";
          return format("barrier %u, where %u of %u threads have arrived", id, barrier.arrived, barrier.count) + gone;
        });
  }
  acquire_from(barrier.published);
}

}  // namespace kl_emu

// --------------------------------------------------------------------------------------------------------------- built-ins

using namespace kl_emu;

void __syncthreads() { barrier_sync(0, current_cta().threads); }

int __syncthreads_or(int predicate) {
  NamedBarrier& barrier = current_cta().barriers[0];
  barrier.reduced |= predicate != 0;
  __syncthreads();
  return barrier.result;
}

void __syncwarp(unsigned mask) {
  warp_collective("__syncwarp", mask, nullptr, [](void* const*, uint32_t) {});
}

namespace {

struct Shuffle {
  uint64_t value;
  uint32_t source;
  uint64_t result;
};

void shuffle(void* const* lanes, uint32_t mask) {
  for (uint32_t lane = 0; lane < kLanes; lane++) {
    if (!(mask >> lane & 1)) continue;
    Shuffle& own = *static_cast<Shuffle*>(lanes[lane]);
    KL_EMU_CHECK(mask >> own.source & 1, "lane %u shuffles from lane %u, which mask 0x%08x does not name", lane, own.source, mask);
    own.result = static_cast<const Shuffle*>(lanes[own.source])->value;
  }
}

struct Vote {
  uint32_t value, result;
};

}  // namespace

uint64_t kl_emu::shuffle_xor(uint32_t mask, uint64_t value, uint32_t lane_mask) {
  Shuffle own{value, (current().lane ^ lane_mask) % kLanes, 0};
  warp_collective("a shuffle", mask, &own, shuffle);
  return own.result;
}

unsigned __ballot_sync(unsigned mask, int predicate) {
  Vote own{predicate != 0, 0};
  warp_collective("__ballot_sync", mask, &own, [](void* const* lanes, uint32_t mask) {
    uint32_t votes = 0;
    for (uint32_t lane = 0; lane < kLanes; lane++) {
      if (mask >> lane & 1) votes |= static_cast<const Vote*>(lanes[lane])->value << lane;
    }
    for (uint32_t lane = 0; lane < kLanes; lane++) {
      if (mask >> lane & 1) static_cast<Vote*>(lanes[lane])->result = votes;
    }
  });
  return own.result;
}

// Combines zero and the values of all lanes.
template <uint32_t (*combine)(uint32_t, uint32_t)>
static unsigned reduce(const char* operation, unsigned mask, unsigned value) {
  Vote own{value, 0};
  warp_collective(operation, mask, &own, [](void* const* lanes, uint32_t mask) {
    uint32_t all = 0;
    for (uint32_t lane = 0; lane < kLanes; lane++) {
      if (mask >> lane & 1) all = combine(all, static_cast<const Vote*>(lanes[lane])->value);
    }
    for (uint32_t lane = 0; lane < kLanes; lane++) {
      if (mask >> lane & 1) static_cast<Vote*>(lanes[lane])->result = all;
    }
  });
  return own.result;
}

static uint32_t sum_of(uint32_t a, uint32_t b) { return a + b; }
static uint32_t larger_of(uint32_t a, uint32_t b) { return a < b ? b : a; }

unsigned __reduce_add_sync(unsigned mask, unsigned value) { return reduce<sum_of>("__reduce_add_sync", mask, value); }
unsigned __reduce_max_sync(unsigned mask, unsigned value) { return reduce<larger_of>("__reduce_max_sync", mask, value); }
