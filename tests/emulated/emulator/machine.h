// State that the runtime's files share: one host thread's emulated GPU, with its launches and memory.
#pragma once

#include <deque>
#include <map>

#include "emulator.h"
#include "kernel_table.h"
#include "runtime.h"
#include "watchdog.h"

namespace kl_emu {

// A launch, from the moment it is queued until its last thread has exited.
struct Launch {
  const Kernel* kernel = nullptr;
  KlEmuLaunch shape{};
  uint64_t seed = 0;
  bool begun = false;  // whether it has become the oldest launch
  std::unique_ptr<unsigned char[]> params_memory;
  const void* params = nullptr;
  uint32_t clusters = 0, next_cluster = 0, resident_limit = 1;
  std::vector<std::unique_ptr<Cluster>> resident;
  // Programmatic dependent launch: the preceding launch until it has completed, and the CTAs that have allowed the next one.
  Launch* previous = nullptr;
  enum class Start { kAfterPrevious, kWhenAllowed, kAtOnce } start = Start::kAfterPrevious;
  uint32_t ctas = 0, ctas_allowing = 0;
  WaitList waiting_for_previous;
  std::shared_ptr<void> publications;

  bool complete() const { return next_cluster == clusters && resident.empty(); }
  bool may_start() const;
};

// Slots of equal size in one reserved address range. One comparison tells whether a pointer belongs to it.
struct Slots {
  unsigned char* base = nullptr;
  uint64_t slot_bytes = 0, bytes = 0;
  std::vector<uint32_t> free;
  uint32_t used = 0;

  void reserve(uint64_t slot_bytes, uint32_t slots);
  void release();
  bool contains(uint64_t address) const { return address - reinterpret_cast<uint64_t>(base) < bytes; }
  // Takes a slot and returns its index. All of the slot except its first `guard` bytes becomes accessible.
  uint32_t take(uint64_t guard);
  void give(uint32_t slot) { free.push_back(slot); }
  unsigned char* at(uint32_t slot) const { return base + slot * slot_bytes; }
};

// Stamps of the last accesses to four bytes of shared memory. A stamp is the agent's index plus one and the last bits of its time; 0 is no
// access. Reads are stored by the agent's index modulo kReaders.
constexpr uint32_t kStampTimeBits = 24, kStampTime = (1u << kStampTimeBits) - 1;
struct Stamps {
  static constexpr uint32_t kReaders = 3;
  uint32_t write, read[kReaders];
};

constexpr uint64_t kStackBytes = 64 << 10, kStackGuard = 4 << 10;
constexpr uint32_t kStacks = 8192;
// An arena slot: the shared state space, its shadow bytes, its stamps.
constexpr uint64_t kArenaBytes = 256 << 10;
constexpr uint64_t kArenaSlotBytes = 2 * kArenaBytes + kArenaBytes / 4 * sizeof(Stamps);
constexpr uint32_t kArenas = 128;

struct Machine {
  Context scheduler, agent;
  Thread* current = nullptr;
  Async* current_async = nullptr;
  std::vector<Thread*> ready, spinners, postponed;
  uint64_t resumed = 0;      // resumed fibers that did not spin
  uint64_t polled_at = ~0ull, poll_rounds = 0;
  std::vector<std::unique_ptr<Async>> asyncs;
  uint32_t async_time = 1;
  std::deque<std::unique_ptr<Launch>> queue;
  Random random;
  uint64_t seed = 0;
  bool newest_first = false;  // run the fiber that became ready last, not a random one
  uint32_t async_one_in = 8;  // how eagerly asynchronous operations run; 0 is as late as possible
  // For a while some clusters, warps or lanes are slow: a third of them, chosen by this salt, run only after the others.
  enum class Slow { kClusters, kWarps, kLanes, kNone } slow = Slow::kNone;
  uint64_t slow_salt = 0, slow_until = 0;
  std::string error;
  std::array<void*, 32> frames{};  // return addresses of the fiber that failed
  int frame_count = 0;
  Slots stacks, arenas;
  std::vector<Cta*> arena_owners;
  std::map<uint64_t, uint64_t> allocations;  // begin to end
  uint64_t last_begin = 0, last_end = 0;     // the allocation that was found last
  Thread* exiting = nullptr;
  bool changed = false;  // a cluster may be able to start, or a launch be complete
  Watchdog watchdog;

  Machine();
  ~Machine();
};

Machine& machine();

// scheduler.cpp
bool run_queue(size_t keep);
void abandon_all();
void make_ready(Thread& thread);
void spin(const void* address, uint64_t value);
void wake_spinners();
void note_progress();
void postpone_cta();

// sources.cpp
void capture_frames();
std::string source_of_frames();

// memory.cpp
void open_arena(Cta& cta, uint32_t dynamic_bytes);
void close_arena(Cta& cta);
void check_arena_idle(Cta& cta);

}  // namespace kl_emu
