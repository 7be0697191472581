// What the bodies of sm_90 instructions keep for each thread, CTA and cluster.
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
  // The last arrival from another CTA: the number of phases once it counts, and the phase of the cluster barrier then. Threads of the
  // CTA have waited for `waited` phases.
  uint64_t remote_phase = 0, remote_cluster_phase = 0, waited = 0;
  Clock gathered, published;
  WaitList waiting;
};

// The mbarrier at that address; an error if there is none. With `outside`, for TMA or another CTA, it must have been fenced.
Mbarrier& mbarrier_at(Cta& cta, uint32_t address, bool outside, const char* operation);
void mbarrier_expect_bytes(Mbarrier& barrier, uint32_t bytes);
void mbarrier_complete_bytes(Mbarrier& barrier, uint32_t bytes);

// --------------------------------------------------------------------------------------------------- asynchronous accesses

// Bytes of shared memory that asynchronous operations read or write, to name them when another one conflicts. Several MMAs of a
// warpgroup that read the same bytes share a claim.
struct Claim {
  uint32_t address, bytes;
  bool write;
  uint32_t agent, count;
  std::string operation;  // and who issued it
};

struct CtaState {
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<Claim> claims;
  std::vector<std::unique_ptr<Warpgroup>> warpgroups;
  // Registers per thread of each warp, and those that setmaxnreg has returned to the pool of the CTA.
  std::vector<uint32_t> registers;
  uint32_t free_registers = 0;
  std::vector<std::vector<uint32_t>> register_changes;  // by warpgroup
  std::vector<uint32_t> changes_made;                   // by warp
  WaitList waiting_for_registers;
  uint64_t cluster_waits = 0;  // phases of the cluster barrier that its threads have waited for
};

// Marks bytes as being read or written by an operation of the calling thread until they are released; an error if another asynchronous
// operation conflicts, or a plain access by the runtime's own rules.
void claim(Cta& cta, uint32_t address, uint32_t bytes, uint32_t alignment, bool write, uint32_t agent, const std::string& operation);
void release_claim(Cta& cta, uint32_t address, uint32_t bytes, bool write, uint32_t agent);

// Agents of clocks: asynchronous operations that complete on an mbarrier, MMAs by warpgroup, reads of TMA stores by warp.
constexpr uint32_t kMbarrierAgents = 24, kWgmmaAgents = 24, kStoreAgents = 28;
static_assert(kStoreAgents + 4 <= Clock::kAsyncAgents, "a clock has no more agents");
uint32_t agent_of(const Mbarrier& barrier);

// Lets the CTA be checked when it ends: by then its asynchronous operations must have been waited for.
void check_at_exit(Cta& cta);

// Who issues an operation, for its description: "TMA load of CTA (0, 0, 0), warp 0".
std::string issued_by(const char* operation);

struct ThreadState {
  WgmmaThread wgmma;
  // TMA stores in the order of their commit groups; true once the box was read from shared memory.
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
