// The runtime of the emulator. It runs a launch with one fiber per GPU thread, and draws the order of everything that the hardware orders
// by itself from a seed. The bodies of PTX instructions use this interface; kernels do not include it.
//
//   Launch > Cluster > Cta > Warp > Thread
//
// The CTAs of a cluster run together, and several clusters are resident at once. Clusters start in the order of their index, as on a GPU,
// so a CTA may wait for CTAs with smaller indices. A fiber runs until it blocks. A blocked fiber is not polled; what it waits for wakes it.
// Work that the hardware does on its own (copies, warpgroup MMAs) is an Async, which runs at a random moment.
//
// An error ends the launch: fail() formats a message and abandons all fibers. All state belongs to one host thread, so two tests can
// emulate in parallel.
#pragma once

#include <stdint.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "context.h"

namespace kl_emu {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kNamedBarriers = 16;
// The lowest valid shared address. Dynamic shared memory begins here, and static variables come after it.
constexpr uint32_t kSharedBase = 1024;
// The most shared memory of a CTA, as on sm_90.
constexpr uint32_t kSharedLimit = 232448;

struct Thread;
struct Warp;
struct Cta;
struct Cluster;
struct Launch;
struct Stamps;

struct Dim {
  uint32_t x, y, z;
};

// --------------------------------------------------------------------------------------------------------- happens-before

// A vector clock over the warps of a cluster and, as further agents, asynchronous operations: one agent for operations that complete on the
// same mbarrier, warpgroup or warp. It finds races in shared memory: an access conflicts with an earlier one of another agent unless a
// barrier orders them.
struct Clock {
  static constexpr uint32_t kWarps = 64, kAsyncAgents = 32, kAgents = kWarps + kAsyncAgents;
  std::array<uint32_t, kAgents> time{};

  void join(const Clock& other);
};

// Describes the operations of an asynchronous agent, for messages.
const char* async_agent_text(uint32_t agent);

// The calling thread publishes all that its warp knows in `clock` (an arrival), or learns what others have published (a wait).
void release_to(Clock& clock);
void acquire_from(const Clock& clock);

// ------------------------------------------------------------------------------------------------------- waiting and errors

// The fibers that wait for one thing.
struct WaitList {
  Thread* first = nullptr;
};

// Ends the launch with a message. The kernel, CTA, warp, lane and seed are added to it. Callable from fibers and from Async::run.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

#define KL_EMU_CHECK(condition, ...)                 \
  do {                                               \
    if (!(condition)) ::kl_emu::fail(__VA_ARGS__);   \
  } while (0)

std::string format(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Blocks the calling fiber until the list is woken. `describe(context)` says what the thread waits for, and is called only to report a
// deadlock.
void block(WaitList& list, std::string (*describe)(const void*), const void* context);
void wake_all(WaitList& list);

// Blocks until ready() is true. Each wake of the list evaluates it again. describe() returns a std::string.
template <class Ready, class Describe>
void wait_until(WaitList& list, Ready ready, Describe describe) {
  while (!ready()) {
    block(list, [](const void* context) { return (*static_cast<const Describe*>(context))(); }, &describe);
  }
}

// Lets other fibers run.
void yield_thread();

// -------------------------------------------------------------------------------------------------------- asynchronous work

// An operation that runs some time after it was posted: at a random moment, but before the emulator would report a deadlock.
struct Async {
  virtual ~Async() = default;
  // Whether the operation may run now.
  virtual bool can_run() const { return true; }
  virtual void run() = 0;
  // The operation and who issued it, for messages.
  virtual std::string describe() const = 0;

  Launch* launch = nullptr;  // set by post()
};

void post(std::unique_ptr<Async> operation);

// ------------------------------------------------------------------------------------------------------------------ random

// xorshift64* seeded by splitmix64. The seed of a launch determines all orders.
struct Random {
  uint64_t state = 1;

  void seed(uint64_t seed);
  uint64_t next();
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }
  bool one_in(uint32_t n) { return below(n) == 0; }
};

// The generator of the running launch.
Random& random();

// ----------------------------------------------------------------------------------------------------------------- threads

// State that instruction bodies keep for a thread, warp, CTA or cluster, by instruction family. It is destroyed with its owner.
template <class T>
T& extension(std::shared_ptr<void>& slot) {
  if (!slot) slot = std::make_shared<T>();
  return *static_cast<T*>(slot.get());
}

struct Thread {
  Warp* warp = nullptr;
  Cta* cta = nullptr;
  uint32_t index = 0, lane = 0;  // in the CTA, in the warp
  Context context;
  uint32_t stack = 0;
  bool exited = false;
  Thread* next_waiting = nullptr;
  // Describes why the fiber is blocked; null if it is not.
  std::string (*describe_wait)(const void*) = nullptr;
  const void* wait_context = nullptr;
  // The last load_acquire, which shows whether the thread spins.
  const void* spin_address = nullptr;
  uint64_t spin_value = 0;
  std::shared_ptr<void> sm80, sm90;
  // Called for accesses to the thread's stack while an asynchronous operation owns some of its registers; null if none does.
  void (*check_registers)(const void* address, uint32_t bytes, bool write) = nullptr;
};

// A meeting of the lanes of a warp in one instruction.
struct Meeting {
  const char* operation = nullptr;  // null if none is under way
  void (*combine)(void* const* lanes, uint32_t mask) = nullptr;
  uint32_t mask = 0, arrived = 0;
  std::array<void*, kLanes> arguments{};
  WaitList waiting;
};

struct Warp {
  Cta* cta = nullptr;
  uint32_t index = 0;  // in the CTA
  uint32_t agent = 0;  // in clocks: the index in the cluster
  uint32_t exited = 0;  // lanes
  Meeting meeting;
  Clock clock;
  std::array<Thread, kLanes> threads;
  std::shared_ptr<void> sm90;
};

// A barrier of the CTA (bar.sync, bar.arrive). __syncthreads uses barrier 0.
struct NamedBarrier {
  uint32_t count = 0;  // the threads it waits for; 0 while nobody has arrived
  uint32_t arrived = 0;
  bool reduced = false, result = false;  // __syncthreads_or
  std::array<uint32_t, 32> lanes{};      // arrived lanes by warp
  uint64_t generation = 0;
  Clock gathered, published;
  WaitList waiting;
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;  // in the cluster
  Dim block{};
  uint32_t threads = 0;
  uint32_t running = 0;  // threads that have not exited
  bool waited_for_previous = false, allowed_next = false;
  std::vector<Warp> warps;
  std::array<NamedBarrier, kNamedBarriers> barriers;
  // Shared memory: byte a of the shared state space is arena[a].
  unsigned char* arena = nullptr;
  uint8_t* shadow = nullptr;
  Stamps* stamps = nullptr;
  uint32_t arena_slot = 0, dynamic_bytes = 0, static_bytes = 0, shared_end = 0;
  std::vector<std::pair<const void*, uint32_t>> static_variables;  // keys and addresses
  std::shared_ptr<void> sm90;
  void (*on_exit)(Cta& cta) = nullptr;  // called by the last thread before it exits
};

struct Cluster {
  Launch* launch = nullptr;
  uint32_t index = 0;
  uint32_t running = 0;  // threads that have not exited
  std::vector<std::unique_ptr<Cta>> ctas;
  std::shared_ptr<void> sm90;
};

// The thread whose fiber runs. Must not be called from Async::run.
Thread& current();
inline Warp& current_warp() { return *current().warp; }
inline Cta& current_cta() { return *current().cta; }
inline Cluster& current_cluster() { return *current().cta->cluster; }
// The CTA of this rank in the calling thread's cluster. Fails if there is none or if it has ended.
Cta& cta_of_rank(uint32_t rank);

// Programmatic dependent launch.
void wait_for_previous_launch();
void allow_next_launch();

// ------------------------------------------------------------------------------------------------------------- collectives

// All lanes of `mask` meet; the last one calls combine(arguments by lane, mask) once for all. Arguments live on the lanes' stacks, so
// results can be written to them. Fails if lanes meet in different operations, and names both.
void warp_collective(const char* operation, uint32_t mask, void* argument, void (*combine)(void* const* lanes, uint32_t mask));

// bar.sync and bar.arrive by `count` threads, whole warps.
void barrier_sync(uint32_t id, uint32_t count);
void barrier_arrive(uint32_t id, uint32_t count);

// ---------------------------------------------------------------------------------------------------------- shared memory

// Converts a pointer, which must lie in the calling thread's CTA, to a shared address, and an address to a host pointer.
uint32_t to_shared_address(const void* pointer);
// Checks only range and alignment; use it for bytes that are checked or marked separately.
unsigned char* shared_pointer(Cta& cta, uint32_t address, uint32_t bytes, uint32_t alignment, const char* operation);

// Accesses by the calling thread, checked: initialized, not under an asynchronous operation, no race with another warp.
void read_shared(Cta& cta, uint32_t address, void* to, uint32_t bytes, uint32_t alignment, const char* operation);
// Reads for software pipelines, which load fragments beyond the last k-block and never use them. Bytes that were never written are NaN,
// which shows in the result of a kernel that does use them.
void read_shared_ahead(Cta& cta, uint32_t address, void* to, uint32_t bytes, uint32_t alignment, const char* operation);
void write_shared(Cta& cta, uint32_t address, const void* from, uint32_t bytes, uint32_t alignment, const char* operation);

// Asynchronous accesses. From begin to end nobody else may write the bytes. While they are written, nobody may read them. Written bytes
// count as initialized from end_async_write on. Bytes that are read must be initialized. The issuing thread calls begin_*; end_* is called
// on behalf of an agent, one of Clock::kAsyncAgents.
void begin_async_write(Cta& cta, uint32_t address, uint32_t bytes, uint32_t alignment, const char* operation);
void end_async_write(Cta& cta, uint32_t address, uint32_t bytes, uint32_t agent = 0);
void begin_async_read(Cta& cta, uint32_t address, uint32_t bytes, uint32_t alignment, const char* operation);
void end_async_read(Cta& cta, uint32_t address, uint32_t bytes, uint32_t agent = 0);

// Stamps what asynchronous operations have written so far, so that a wait for `clock` covers it. Called when an operation completes on its
// barrier's clock.
void release_async_to(Clock& clock, uint32_t agent = 0);

// Marks bytes as initialized without a race check. An mbarrier is an object: plain accesses do not touch its words while it is alive.
void mark_initialized(Cta& cta, uint32_t address, uint32_t bytes);

// ---------------------------------------------------------------------------------------------------------- global memory

// Fails unless the bytes lie in one live allocation. Reads may also touch kernel parameters or constants.
void check_global_read(const void* address, uint64_t bytes, const char* operation);
void check_global_write(const void* address, uint64_t bytes, const char* operation);

}  // namespace kl_emu
