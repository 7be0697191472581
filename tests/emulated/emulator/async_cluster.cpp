// Clusters: barriers and distributed shared memory. Also instructions of whole warps: setmaxnreg and stmatrix.
#include <string.h>

#include <algorithm>

#include "async_sm90.h"
#include "async_state.h"

namespace kl_emu {
namespace {

constexpr uint32_t kRegistersOfSm = 65536, kRegisterUnit = 8, kFewestRegisters = 24, kMostRegisters = 256;

// A store of up to sixteen bytes that is on its way to another CTA.
struct RemoteStore : Async {
  Cta* cta;
  uint32_t to, bytes;
  unsigned char value[16];
  Mbarrier* barrier;

  void run() override {
    memcpy(cta->arena + to, value, bytes);
    end_async_write(*cta, to, bytes, agent_of(*barrier));
    mbarrier_complete_bytes(*barrier, bytes);
  }

  std::string describe() const override { return format("st.async to +0x%x of the CTA of rank %u", to, cta->rank); }
};

struct RegisterChange {
  uint32_t registers;
  bool increase;
};

void change_registers(void* const* lanes, uint32_t) {
  const RegisterChange& change = *static_cast<const RegisterChange*>(lanes[0]);
  Cta& cta = current_cta();
  CtaState& state = state_of(cta);
  const uint32_t warp = current_warp().index, group = warp / 4;
  if (state.registers.empty()) {
    // The registers that ptxas gives a kernel whose launch bounds allow one such CTA on an SM.
    const uint32_t start = std::min(kRegistersOfSm / cta.threads / kRegisterUnit * kRegisterUnit, kMostRegisters - kRegisterUnit);
    state.registers.assign(cta.warps.size(), start);
    state.register_changes.resize((cta.warps.size() + 3) / 4);
    state.changes_made.resize(cta.warps.size());
  }
  // All warps of a warpgroup make the same changes.
  auto& changes = state.register_changes[group];
  const uint32_t number = state.changes_made[warp]++;
  if (number == changes.size()) changes.push_back(change.registers);
  KL_EMU_CHECK(changes[number] == change.registers, "setmaxnreg %u, but another warp of the warpgroup has asked for %u", change.registers,
               changes[number]);
  uint32_t& own = state.registers[warp];
  KL_EMU_CHECK(change.increase ? change.registers >= own : change.registers <= own, "setmaxnreg.%s %u of a warp that has %u",
               change.increase ? "inc" : "dec", change.registers, own);
  if (!change.increase) state.free_registers += (own - change.registers) * kLanes;
  if (!change.increase) own = change.registers;
  wake_all(state.waiting_for_registers);
}

struct StoredMatrices {
  uint32_t row;
  uint32_t words[4];
};

// Lane 8 i + r has the address of row r of matrix i. Lanes 4 r to 4 r + 3 hold two values of that row each.
void store_matrices(void* const* lanes, uint32_t) {
  for (uint32_t matrix = 0; matrix < 4; matrix++) {
    for (uint32_t row = 0; row < 8; row++) {
      uint32_t words[4];
      for (uint32_t i = 0; i < 4; i++) words[i] = static_cast<const StoredMatrices*>(lanes[4 * row + i])->words[matrix];
      write_shared(current_cta(), static_cast<const StoredMatrices*>(lanes[8 * matrix + row])->row, words, sizeof(words), 16, "stmatrix");
    }
  }
}

void nothing(void* const*, uint32_t) {}

}  // namespace

namespace ptx {

void setmaxnreg(uint32_t registers, bool increase) {
  KL_EMU_CHECK(registers % kRegisterUnit == 0 && registers >= kFewestRegisters && registers <= kMostRegisters,
               "setmaxnreg %u: a multiple of 8 from 24 to 256 is allowed", registers);
  RegisterChange change{registers, increase};
  warp_collective("setmaxnreg", kAllLanes, &change, change_registers);
  if (!increase) return;
  // The warp gets registers once the CTA's pool has enough.
  CtaState& state = state_of(current_cta());
  const uint32_t warp = current_warp().index;
  wait_until(
      state.waiting_for_registers,
      [&] {
        uint32_t& own = state.registers[warp];
        const uint32_t needed = (registers - own) * kLanes;
        if (needed > state.free_registers) return false;
        state.free_registers -= needed;
        own = registers;
        return true;
      },
      [&] {
        return format("setmaxnreg.inc %u: the warp has %u registers per thread, and %u are free in the CTA", registers,
                      state.registers[warp], state.free_registers);
      });
}

void stmatrix_x4(uint32_t row, const uint32_t (&words)[4]) {
  StoredMatrices own{row, {words[0], words[1], words[2], words[3]}};
  warp_collective("stmatrix", kAllLanes, &own, store_matrices);
}

void store_shared(uint32_t to, const void* from, uint32_t bytes) { write_shared(current_cta(), to, from, bytes, bytes, "st.shared"); }
void load_shared(uint32_t from, void* to, uint32_t bytes) { read_shared(current_cta(), from, to, bytes, bytes, "ld.shared"); }

void named_barrier_sync(uint32_t id, uint32_t threads) { barrier_sync(id, threads); }
void named_barrier_arrive(uint32_t id, uint32_t threads) { barrier_arrive(id, threads); }

void wait_for_previous_kernel() { wait_for_previous_launch(); }
void launch_next_kernel() { allow_next_launch(); }

uint32_t cluster_rank() { return current_cta().rank; }

void cluster_arrive(bool release) {
  warp_collective("barrier.cluster.arrive", kAllLanes, nullptr, nothing);
  ClusterState& state = state_of(current_cluster());
  const bool first = state.arrivals.emplace(&current(), state.phase).second;
  KL_EMU_CHECK(first, "barrier.cluster.arrive by a thread that has not waited since its last arrival");
  if (release) release_to(state.gathered);
  if (++state.arrived < current_cluster().running) return;
  state.arrived = 0;
  state.phase++;
  state.published.join(state.gathered);
  wake_all(state.waiting);
}

void cluster_wait() {
  warp_collective("barrier.cluster.wait", kAllLanes, nullptr, [](void* const*, uint32_t) { nothing(nullptr, 0); });
  Cluster& cluster = current_cluster();
  ClusterState& state = state_of(cluster);
  const auto arrival = state.arrivals.find(&current());
  KL_EMU_CHECK(arrival != state.arrivals.end(), "barrier.cluster.wait by a thread that has not arrived");
  const uint64_t phase = arrival->second;
  wait_until(
      state.waiting, [&] { return state.phase != phase; },
      [&] { return format("the cluster barrier, where %u of %u threads have arrived", state.arrived, cluster.running); });
  state.arrivals.erase(&current());
  acquire_from(state.published);
  CtaState& own = state_of(current_cta());
  own.cluster_waits = std::max(own.cluster_waits, phase + 1);
}

void store_remote_async(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t rank) {
  Cta& cta = cta_of_rank(rank);
  auto store = std::make_unique<RemoteStore>();
  store->cta = &cta, store->to = to, store->bytes = bytes;
  memcpy(store->value, from, bytes);
  store->barrier = &mbarrier_at(cta, barrier, true, "st.async");
  begin_async_write(cta, to, bytes, bytes, "st.async");
  post(std::move(store));
}

uint16_t load_remote(const void* p, uint32_t rank) {
  uint16_t value;
  read_shared(cta_of_rank(rank), to_shared_address(p), &value, sizeof(value), sizeof(value), "ld.shared::cluster");
  return value;
}

}  // namespace ptx
}  // namespace kl_emu
