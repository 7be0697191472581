// mbarriers. A phase completes when all arrivals have come and all announced bytes were written.
#include <algorithm>

#include "async_sm90.h"
#include "async_state.h"

namespace kl_emu {
namespace {

constexpr uint32_t kMostArrivals = (1 << 20) - 1;
constexpr int64_t kMostBytes = (1 << 20) - 1;

// Completes the phase once nothing is missing.
void complete_if_done(Mbarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.phase++;
  barrier.pending = barrier.count;
  barrier.published.join(barrier.gathered);
  wake_all(barrier.waiting);
}

void arrive(Mbarrier& barrier, const char* operation) {
  KL_EMU_CHECK(barrier.pending > 0, "%s: mbarrier +0x%x has had all %u arrivals of phase %llu; %lld bytes are missing", operation,
               barrier.address, barrier.count, static_cast<unsigned long long>(barrier.phase),
               static_cast<long long>(barrier.bytes));
  release_to(barrier.gathered);
  barrier.pending--;
  complete_if_done(barrier);
}

}  // namespace

uint32_t agent_of(const Mbarrier& barrier) { return barrier.address / 8 % kMbarrierAgents; }

Mbarrier& mbarrier_at(Cta& cta, uint32_t address, bool outside, const char* operation) {
  shared_pointer(cta, address, 8, 8, operation);
  auto& barriers = state_of(cta).mbarriers;
  const auto found = barriers.find(address);
  KL_EMU_CHECK(found != barriers.end(), "%s: there is no initialized mbarrier at +0x%x of the CTA of rank %u", operation,
               address, cta.rank);
  KL_EMU_CHECK(!outside || found->second.fenced, "%s: mbarrier +0x%x was initialized without fence_mbarrier_init", operation,
               address);
  KL_EMU_CHECK(&cta == &current_cta() || state_of(current_cta()).cluster_waits > found->second.fence_phase,
               "%s: mbarrier +0x%x of the CTA of rank %u was initialized, but no cluster barrier says so", operation, address, cta.rank);
  return found->second;
}

void mbarrier_expect_bytes(Mbarrier& barrier, uint32_t bytes) {
  barrier.bytes += bytes;
  KL_EMU_CHECK(barrier.bytes <= kMostBytes, "mbarrier +0x%x expects %lld bytes; it can count %lld", barrier.address,
               static_cast<long long>(barrier.bytes), static_cast<long long>(kMostBytes));
}

void mbarrier_complete_bytes(Mbarrier& barrier, uint32_t bytes) {
  barrier.bytes -= bytes;
  KL_EMU_CHECK(barrier.bytes >= -kMostBytes, "mbarrier +0x%x received %lld bytes more than were announced", barrier.address,
               -static_cast<long long>(barrier.bytes));
  release_async_to(barrier.gathered, agent_of(barrier));
  complete_if_done(barrier);
}

namespace {

// The mbarrier in a CTA of the cluster at which the calling thread arrives.
Mbarrier& remote_mbarrier(uint32_t address, uint32_t rank, const char* operation) {
  Cta& cta = cta_of_rank(rank);
  const bool remote = &cta != &current_cta();
  Mbarrier& barrier = mbarrier_at(cta, address, remote, operation);
  if (remote) {
    barrier.remote_phase = barrier.phase + 1, barrier.remote_cluster_phase = state_of(current_cluster()).phase;
    check_at_exit(cta);
  }
  return barrier;
}

}  // namespace

namespace ptx {

void mbarrier_init(uint32_t address, uint32_t arrivals) {
  Cta& cta = current_cta();
  shared_pointer(cta, address, 8, 8, "mbarrier.init");
  KL_EMU_CHECK(arrivals > 0 && arrivals <= kMostArrivals, "mbarrier.init +0x%x with %u arrivals", address, arrivals);
  auto& barriers = state_of(cta).mbarriers;
  // Another mbarrier may begin in the seven bytes before this one or within it.
  const auto next = barriers.lower_bound(address - 7);
  KL_EMU_CHECK(next == barriers.end() || next->first > address + 7, "mbarrier.init +0x%x: there is an mbarrier at +0x%x already",
               address, next->first);
  Mbarrier& barrier = barriers[address];
  barrier.address = address;
  barrier.count = barrier.pending = arrivals;
  barrier.initializer = &current();
  mark_initialized(cta, address, 8);
}

void fence_mbarrier_init() {
  const uint64_t phase = state_of(current_cluster()).phase;
  for (auto& [address, barrier] : state_of(current_cta()).mbarriers) {
    if (barrier.fenced || barrier.initializer != &current()) continue;
    barrier.fenced = true, barrier.fence_phase = phase;
  }
}

void mbarrier_arrive(uint32_t address) { arrive(mbarrier_at(current_cta(), address, false, "mbarrier.arrive"), "mbarrier.arrive"); }

void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes) {
  Mbarrier& barrier = mbarrier_at(current_cta(), address, false, "mbarrier.arrive.expect_tx");
  mbarrier_expect_bytes(barrier, bytes);
  arrive(barrier, "mbarrier.arrive.expect_tx");
}

void mbarrier_arrive_remote(uint32_t address, uint32_t rank) {
  arrive(remote_mbarrier(address, rank, "mbarrier.arrive.shared::cluster"), "mbarrier.arrive.shared::cluster");
}

void mbarrier_arrive_expect_tx_remote(uint32_t address, uint32_t bytes, uint32_t rank) {
  Mbarrier& barrier = remote_mbarrier(address, rank, "mbarrier.arrive.expect_tx.shared::cluster");
  mbarrier_expect_bytes(barrier, bytes);
  arrive(barrier, "mbarrier.arrive.expect_tx.shared::cluster");
}

void mbarrier_wait(uint32_t address, uint32_t parity) {
  KL_EMU_CHECK(parity < 2, "mbarrier.try_wait +0x%x: the parity is %u", address, parity);
  Mbarrier& barrier = mbarrier_at(current_cta(), address, false, "mbarrier.try_wait");
  wait_until(
      barrier.waiting, [&] { return (barrier.phase & 1) != parity; },
      [&] {
        return format("mbarrier +0x%x, phase parity %u: %u of %u arrivals and %lld bytes are missing", address, parity,
                      barrier.pending, barrier.count, static_cast<long long>(barrier.bytes));
      });
  barrier.waited = std::max(barrier.waited, barrier.phase);
  acquire_from(barrier.published);
}

}  // namespace ptx
}  // namespace kl_emu
