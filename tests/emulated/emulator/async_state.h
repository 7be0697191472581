// The state that sm_90 instructions keep for each thread, CTA and cluster.
#pragma once

#include <stdint.h>

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"
#include "wgmma_queue.h"

namespace kl_emu {

// ---------------------------------------------------------------------------------------------------------------- mbarriers

struct Mbarrier {
  uint32_t address = 0;
  uint32_t count = 0;    // arrivals that complete a phase
  uint32_t pending = 0;  // arrivals that the current phase still waits for
  int64_t bytes = 0;     // announced and not yet written; negative if more were written than announced
  uint64_t phase = 0;
  const Thread* initializer = nullptr;
  bool fenced = false;  // visible to TMA and, after the phase of the cluster barrier in which it was fenced, to the other CTAs
  uint64_t fence_phase = 0;
  // The last arrival from another CTA: the number of phases once it counts, and the phase of the cluster barrier at that time. Threads of
  // the CTA have waited for `waited` phases.
  uint64_t remote_phase = 0, remote_cluster_phase = 0, waited = 0;
  Clock gathered, published;
  WaitList waiting;
};

// The mbarrier at an address; fails if there is none. With `outside`, for TMA or another CTA, it must have been fenced.
Mbarrier& mbarrier_at(Cta& cta, uint32_t address, bool outside, const char* operation);
void mbarrier_expect_bytes(Mbarrier& barrier, uint32_t bytes);
void mbarrier_complete_bytes(Mbarrier& barrier, uint32_t bytes);

// --------------------------------------------------------------------------------------------------- asynchronous accesses

// Bytes of shared memory that asynchronous operations read or write, to name those operations when another one conflicts. Several MMAs of a
// warpgroup that read the same bytes share a claim.
struct Claim {
  uint32_t address, bytes;
  bool write;
  uint32_t agent, count;
  std::string operation;  // includes who issued it
};

struct CtaState {
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<Claim> claims;
  std::vector<std::unique_ptr<Warpgroup>> warpgroups;
  // Registers per thread of each warp, and registers that setmaxnreg has returned to the CTA's pool.
  std::vector<uint32_t> registers;
  uint32_t free_registers = 0;
  std::vector<std::vector<uint32_t>> register_changes;  // by warpgroup
  std::vector<uint32_t> changes_made;                   // by warp
  WaitList waiting_for_registers;
  uint64_t cluster_waits = 0;  // phases of the cluster barrier that its threads have waited for
};

// Marks bytes as read or written by an operation of the calling thread until release_claim. Fails if another asynchronous operation
// conflicts, or, by the runtime's own rules, a plain access.
void claim(Cta& cta, uint32_t address, uint32_t bytes, uint32_t alignment, bool write, uint32_t agent, const std::string& operation);
void release_claim(Cta& cta, uint32_t address, uint32_t bytes, bool write, uint32_t agent);

// Clock agents: asynchronous operations that complete on an mbarrier, MMAs by warpgroup, reads of TMA stores by warp.
constexpr uint32_t kMbarrierAgents = 24, kWgmmaAgents = 24, kStoreAgents = 28;
static_assert(kStoreAgents + 4 <= Clock::kAsyncAgents, "a clock has no more agents");
uint32_t agent_of(const Mbarrier& barrier);

// Checks the CTA when it ends: by then it must have waited for its asynchronous operations.
void check_at_exit(Cta& cta);

// Describes an operation with the thread that issued it: "TMA load of CTA (0, 0, 0), warp 0".
std::string issued_by(const char* operation);

struct ThreadState {
  WgmmaThread wgmma;
  // TMA stores by commit group, in order; true once the box was read from shared memory.
  std::deque<std::shared_ptr<bool>> stores;
  Clock stores_read;
  WaitList waiting_for_stores;
};

struct WarpState {
  uint32_t fenced_time = 0;  // of the warp's clock: earlier writes to shared memory are visible to the async proxy
};

struct ClusterState {
  uint32_t arrived = 0;
  uint64_t phase = 0;
  Clock gathered, published;
  WaitList waiting;
  std::map<const Thread*, uint64_t> arrivals;  // the phase in which a thread that has not waited yet arrived
};

inline CtaState& state_of(Cta& cta) { return extension<CtaState>(cta.sm90); }
inline ThreadState& state_of(Thread& thread) { return extension<ThreadState>(thread.sm90); }
inline WarpState& state_of(Warp& warp) { return extension<WarpState>(warp.sm90); }
inline ClusterState& state_of(Cluster& cluster) { return extension<ClusterState>(cluster.sm90); }

}  // namespace kl_emu
