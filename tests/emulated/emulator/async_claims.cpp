// Tracks the shared memory that asynchronous operations access, and whether earlier writes are visible to them.
#include "async_sm90.h"
#include "async_state.h"
#include "machine.h"

namespace kl_emu {
namespace {

// TMA stores and wgmma read through the async proxy, which sees a thread's plain writes only after fence_proxy_async.
void check_fenced(Cta& cta, uint32_t address, uint32_t bytes, const std::string& operation) {
  const uint32_t warps = static_cast<uint32_t>(cta.warps.size());
  for (uint32_t word = address / 4; word < (address + bytes + 3) / 4; word++) {
    const uint32_t stamp = cta.stamps[word].write;
    const uint32_t agent = (stamp >> kStampTimeBits) - 1, time = stamp & kStampTime;
    if (stamp == 0 || agent >= Clock::kWarps) continue;
    Warp& writer = cta.cluster->ctas[agent / warps]->warps[agent % warps];
    KL_EMU_CHECK(time <= (state_of(writer).fenced_time & kStampTime),
                 "%s reads shared memory +0x%x, which warp %u of the CTA of rank %u wrote without fence_proxy_async", operation.c_str(),
                 word * 4, writer.index, writer.cta->rank);
  }
}

// Fails if the hardware would still access the shared memory or registers of a CTA that ends.
void check_complete(Cta& cta) {
  for (Warp& warp : cta.warps) {
    for (Thread& thread : warp.threads) {
      if (!thread.sm90) continue;
      const ThreadState& state = state_of(thread);
      KL_EMU_CHECK(state.stores.empty(), "the CTA ends, but warp %u has not waited until its TMA stores have read shared memory",
                   warp.index);
      KL_EMU_CHECK(state.wgmma.outputs.empty(), "the CTA ends, but warp %u has not waited for its wgmma", warp.index);
    }
  }
  const CtaState& state = state_of(cta);
  for (const auto& [address, barrier] : state.mbarriers) {
    KL_EMU_CHECK(barrier.waited >= barrier.remote_phase || state.cluster_waits > barrier.remote_cluster_phase,
                 "the CTA ends without having waited for other CTAs of the cluster, which arrive at its mbarrier +0x%x", address);
  }
}

}  // namespace

const char* async_agent_text(uint32_t agent) {
  if (agent < kMbarrierAgents) return "an asynchronous copy";
  return agent < kStoreAgents ? "a wgmma" : "a TMA store";
}

void check_at_exit(Cta& cta) { cta.on_exit = check_complete; }

std::string issued_by(const char* operation) {
  const Cta& cta = current_cta();
  return format("%s of CTA (%u, %u, %u), warp %u", operation, cta.block.x, cta.block.y, cta.block.z, current_warp().index);
}

// The runtime marks bytes. A claim adds who accesses them.
void claim(Cta& cta, uint32_t address, uint32_t bytes, uint32_t alignment, bool write, uint32_t agent, const std::string& operation) {
  auto& claims = state_of(cta).claims;
  for (Claim& own : claims) {
    if (!write && !own.write && own.address == address && own.bytes == bytes && own.agent == agent) {
      own.count++;
      return;
    }
  }
  for (const Claim& other : claims) {
    const bool apart = address + bytes <= other.address || other.address + other.bytes <= address;
    KL_EMU_CHECK(apart || (!write && !other.write), "%s %s shared memory +0x%x to +0x%x, which a %s still %s (+0x%x to +0x%x)",
                 operation.c_str(), write ? "writes" : "reads", address, address + bytes, other.operation.c_str(),
                 other.write ? "writes" : "reads", other.address, other.address + other.bytes);
  }
  if (!write) check_fenced(cta, address, bytes, operation);
  (write ? begin_async_write : begin_async_read)(cta, address, bytes, alignment, operation.c_str());
  claims.push_back({address, bytes, write, agent, 1, operation});
}

void release_claim(Cta& cta, uint32_t address, uint32_t bytes, bool write, uint32_t agent) {
  auto& claims = state_of(cta).claims;
  for (Claim& own : claims) {
    if (own.address != address || own.bytes != bytes || own.write != write || own.agent != agent) continue;
    if (--own.count > 0) return;
    (write ? end_async_write : end_async_read)(cta, address, bytes, agent);
    own = std::move(claims.back());
    claims.pop_back();
    return;
  }
}

namespace ptx {

void fence_proxy_async() {
  Warp& warp = current_warp();
  // Later writes have a later time.
  state_of(warp).fenced_time = warp.clock.time[warp.agent]++;
}

}  // namespace ptx
}  // namespace kl_emu
