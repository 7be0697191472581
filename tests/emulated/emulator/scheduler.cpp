// The scheduler: fibers, asynchronous operations, programmatic dependent launch, deadlocks.
#include <execinfo.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>

#include "machine.h"

namespace kl_emu {

namespace {

std::string format_list(const char* text, va_list arguments) {
  char buffer[1024];
  vsnprintf(buffer, sizeof(buffer), text, arguments);
  return buffer;
}

std::string place(const Cta& cta) {
  const Launch& launch = *cta.cluster->launch;
  return format("%s: CTA (%u, %u, %u)", launch.kernel->symbol, cta.block.x, cta.block.y, cta.block.z);
}

}  // namespace

Machine& machine() {
  static thread_local Machine instance;
  return instance;
}

Machine::Machine() {
  stacks.reserve(kStackBytes, kStacks);
  arenas.reserve(kArenaSlotBytes, kArenas);
  arena_owners.resize(kArenas);
  // The first call loads the unwinder, and a fiber's stack is too small for that.
  void* frame;
  backtrace(&frame, 1);
}

Machine::~Machine() {
  stacks.release();
  arenas.release();
}

// ------------------------------------------------------------------------------------------------------------------- slots

void Slots::reserve(uint64_t slot, uint32_t slots) {
  slot_bytes = slot, bytes = slot * slots;
  void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    perror("emulator: mmap");
    abort();
  }
  base = static_cast<unsigned char*>(memory);
}

void Slots::release() { munmap(base, bytes); }

uint32_t Slots::take(uint64_t guard) {
  if (!free.empty()) {
    const uint32_t slot = free.back();
    free.pop_back();
    return slot;
  }
  const uint32_t slot = used++;
  if (used * slot_bytes > bytes || mprotect(at(slot) + guard, slot_bytes - guard, PROT_READ | PROT_WRITE) != 0) {
    fprintf(stderr, "emulator: no memory for slot %u\n", slot);
    abort();
  }
  return slot;
}

// ------------------------------------------------------------------------------------------------------------------ random

void Random::seed(uint64_t seed) {
  // splitmix64 makes neighboring seeds give unrelated orders.
  uint64_t z = seed + 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  state = z ^ z >> 31;
  if (state == 0) state = 1;
}

uint64_t Random::next() {
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return state * 0x2545f4914f6cdd1du;
}

Random& random() { return machine().random; }

// ------------------------------------------------------------------------------------------------------------------ errors

std::string format(const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  std::string result = format_list(text, arguments);
  va_end(arguments);
  return result;
}

void fail(const char* text, ...) {
  Machine& m = machine();
  va_list arguments;
  va_start(arguments, text);
  const std::string what = format_list(text, arguments);
  va_end(arguments);
  std::string where;
  if (m.current_async) {
    where = m.current_async->describe();
  } else if (m.current) {
    where = place(*m.current->cta) + format(", warp %u, lane %u", m.current->warp->index, m.current->lane);
  }
  m.error = where + ": " + what + format(" (seed %llu)", static_cast<unsigned long long>(m.seed));
  capture_frames();
  // The scheduler abandons all fibers, including this one.
  Context abandoned;
  switch_context(abandoned, m.scheduler);
  abort();
}

// ----------------------------------------------------------------------------------------------------------------- waiting

Thread& current() { return *machine().current; }

void make_ready(Thread& thread) { machine().ready.push_back(&thread); }

static void leave(Thread& thread) { switch_context(thread.context, machine().scheduler); }

void block(WaitList& list, std::string (*describe)(const void*), const void* context) {
  Thread& thread = current();
  thread.next_waiting = list.first, list.first = &thread;
  thread.describe_wait = describe, thread.wait_context = context;
  leave(thread);
  thread.describe_wait = nullptr;
}

void wake_all(WaitList& list) {
  Thread* thread = list.first;
  list.first = nullptr;
  while (thread) {
    Thread* next = thread->next_waiting;
    thread->next_waiting = nullptr;
    make_ready(*thread);
    thread = next;
  }
}

void yield_thread() {
  Thread& thread = current();
  make_ready(thread);
  leave(thread);
}

void spin(const void* address, uint64_t value) {
  Machine& m = machine();
  Thread& thread = *m.current;
  thread.spin_address = address, thread.spin_value = value;
  thread.wait_context = &thread;
  thread.describe_wait = [](const void* context) {
    const Thread& waiting = *static_cast<const Thread*>(context);
    return format("spins on global memory at %p, which stays %llu", waiting.spin_address,
                  static_cast<unsigned long long>(waiting.spin_value));
  };
  m.spinners.push_back(&thread);
  m.resumed--;
  leave(thread);
  thread.describe_wait = nullptr;
}

void wake_spinners() {
  Machine& m = machine();
  m.ready.insert(m.ready.end(), m.spinners.begin(), m.spinners.end());
  m.spinners.clear();
}

// Called when a thread has published something in global memory. Sometimes the other threads of its CTA do not run again until everything
// else has run as far as it can. This shows if data that they should have written first is missing.
void postpone_cta() {
  Machine& m = machine();
  if (!m.random.one_in(2)) return;
  const auto others = std::partition(m.ready.begin(), m.ready.end(), [&](Thread* thread) { return thread->cta != m.current->cta; });
  m.postponed.insert(m.postponed.end(), others, m.ready.end());
  m.ready.erase(others, m.ready.end());
}

static bool resume_postponed() {
  Machine& m = machine();
  m.ready.swap(m.postponed);
  return !m.ready.empty();
}

void note_progress() { machine().resumed++; }

void post(std::unique_ptr<Async> operation) {
  Machine& m = machine();
  operation->launch = m.current ? m.current->cta->cluster->launch : m.current_async->launch;
  m.asyncs.push_back(std::move(operation));
}

Cta& cta_of_rank(uint32_t rank) {
  Cluster& cluster = current_cluster();
  KL_EMU_CHECK(rank < cluster.ctas.size(), "rank %u of a cluster of %zu CTAs", rank, cluster.ctas.size());
  Cta& cta = *cluster.ctas[rank];
  KL_EMU_CHECK(cta.running > 0, "the CTA of rank %u has ended; its shared memory is gone", rank);
  return cta;
}

// ---------------------------------------------------------------------------------------------- programmatic dependent launch

bool Launch::may_start() const {
  if (!previous || start == Start::kAtOnce) return true;
  return start == Start::kWhenAllowed && previous->ctas_allowing == previous->ctas;
}

void wait_for_previous_launch() {
  Cta& cta = current_cta();
  Launch& launch = *cta.cluster->launch;
  wait_until(launch.waiting_for_previous, [&] { return !launch.previous; }, [] { return std::string("the previous kernel"); });
  cta.waited_for_previous = true;
}

void allow_next_launch() {
  Cta& cta = current_cta();
  if (cta.allowed_next) return;
  cta.allowed_next = true;
  cta.cluster->launch->ctas_allowing++;
  machine().changed = true;
}

// ------------------------------------------------------------------------------------------------------------------ fibers

static void fiber_main() {
  Thread& thread = current();
  const Launch& launch = *thread.cta->cluster->launch;
  launch.kernel->run(launch.params);
  Warp& warp = *thread.warp;
  const Meeting& meeting = warp.meeting;
  KL_EMU_CHECK(!meeting.operation || !(meeting.mask >> thread.lane & 1), "exits, while other lanes of its warp wait for it in %s",
               meeting.operation);
  thread.exited = true;
  warp.exited |= 1u << thread.lane;
  if (--thread.cta->running == 0) {
    if (thread.cta->on_exit) thread.cta->on_exit(*thread.cta);
    check_arena_idle(*thread.cta);
    allow_next_launch();
  }
  thread.cta->cluster->running--;
  machine().exiting = &thread;
  leave(thread);
  abort();
}

// Asynchronous operations run on their own stack, so an error can abandon them as well.
static void agent_main() {
  for (;;) {
    Machine& m = machine();
    m.current_async->run();
    switch_context(m.agent, m.scheduler);
  }
}

static void start_cluster(Launch& launch) {
  Machine& m = machine();
  auto cluster = std::make_unique<Cluster>();
  cluster->launch = &launch;
  cluster->index = launch.next_cluster++;
  const KlEmuLaunch& shape = launch.shape;
  const uint32_t warps = shape.threads / kLanes;
  cluster->running = shape.threads * shape.cluster;
  for (uint32_t rank = 0; rank < shape.cluster; rank++) {
    auto cta = std::make_unique<Cta>();
    const uint32_t linear = cluster->index * shape.cluster + rank;
    cta->cluster = cluster.get(), cta->rank = rank, cta->threads = cta->running = shape.threads;
    cta->block = {linear % shape.grid[0], linear / shape.grid[0] % shape.grid[1], linear / shape.grid[0] / shape.grid[1]};
    open_arena(*cta, shape.shared);
    cta->warps = std::vector<Warp>(warps);
    for (uint32_t w = 0; w < warps; w++) {
      Warp& warp = cta->warps[w];
      warp.cta = cta.get(), warp.index = w, warp.agent = rank * warps + w;
      warp.clock.time[warp.agent] = 1;
      for (uint32_t lane = 0; lane < kLanes; lane++) {
        Thread& thread = warp.threads[lane];
        thread.warp = &warp, thread.cta = cta.get(), thread.index = w * kLanes + lane, thread.lane = lane;
        thread.stack = m.stacks.take(kStackGuard);
        prepare(thread.context, m.stacks.at(thread.stack), kStackBytes, fiber_main);
        make_ready(thread);
      }
    }
    cluster->ctas.push_back(std::move(cta));
  }
  launch.resident.push_back(std::move(cluster));
}

static void free_cluster(Cluster& cluster) {
  for (auto& cta : cluster.ctas) {
    for (Warp& warp : cta->warps) {
      for (Thread& thread : warp.threads) machine().stacks.give(thread.stack);
    }
    close_arena(*cta);
  }
}

static void remove_exited() {
  Machine& m = machine();
  Cluster& cluster = *m.exiting->cta->cluster;
  m.exiting = nullptr;
  if (cluster.running > 0) return;
  m.changed = true;
  auto& resident = cluster.launch->resident;
  free_cluster(cluster);
  resident.erase(std::find_if(resident.begin(), resident.end(), [&](auto& other) { return other.get() == &cluster; }));
}

// Runs the i-th asynchronous operation if it can run.
static bool run_async(size_t i) {
  Machine& m = machine();
  if (!m.asyncs[i]->can_run()) return false;
  std::unique_ptr<Async> operation = std::move(m.asyncs[i]);
  m.asyncs[i] = std::move(m.asyncs.back());
  m.asyncs.pop_back();
  m.current_async = operation.get();
  switch_context(m.scheduler, m.agent);
  m.current_async = nullptr;
  return true;
}

static bool run_any_async() {
  Machine& m = machine();
  const size_t count = m.asyncs.size(), first = count ? m.random.below(count) : 0;
  for (size_t i = 0; i < count; i++) {
    if (run_async((first + i) % count)) return true;
  }
  return false;
}

// Lists the set bits: "lane 3", "lanes 0-15 31".
static std::string bits_text(const char* name, uint32_t mask) {
  std::string text = name;
  if (mask & (mask - 1)) text += "s";
  for (uint32_t first = 0; first < 32; first++) {
    uint32_t end = first;
    while (end < 32 && mask >> end & 1) end++;
    if (end == first) continue;
    text += format(end == first + 1 ? " %u" : " %u-%u", first, end - 1);
    first = end;
  }
  return text;
}

// Describes what the threads of a CTA wait for. Warps that wait for the same with the same lanes share a line.
static void describe_waits(const Cta& cta, std::vector<std::string>& lines) {
  struct Wait {
    std::string what;
    uint32_t lanes, warps;
  };
  std::vector<Wait> all;
  for (const Warp& warp : cta.warps) {
    std::vector<Wait> own;
    for (const Thread& thread : warp.threads) {
      if (thread.exited) continue;
      const std::string what = thread.describe_wait ? thread.describe_wait(thread.wait_context) : "an unknown event";
      auto found = std::find_if(own.begin(), own.end(), [&](const Wait& wait) { return wait.what == what; });
      if (found == own.end()) found = own.insert(own.end(), {what, 0, 1u << warp.index});
      found->lanes |= 1u << thread.lane;
    }
    for (const Wait& wait : own) {
      auto found = std::find_if(all.begin(), all.end(), [&](const Wait& w) { return w.what == wait.what && w.lanes == wait.lanes; });
      if (found == all.end()) {
        all.push_back(wait);
      } else {
        found->warps |= wait.warps;
      }
    }
  }
  for (const Wait& wait : all) {
    lines.push_back(place(cta) + ", " + bits_text("warp", wait.warps) + ", " + bits_text("lane", wait.lanes) + ": " + wait.what);
  }
}

static void report_deadlock() {
  constexpr size_t kLines = 64;
  Machine& m = machine();
  std::vector<std::string> lines;
  for (auto& launch : m.queue) {
    for (auto& cluster : launch->resident) {
      for (auto& cta : cluster->ctas) describe_waits(*cta, lines);
    }
  }
  for (auto& operation : m.asyncs) lines.push_back("cannot run: " + operation->describe());
  m.error = format("deadlock (seed %llu): no thread can run", static_cast<unsigned long long>(m.seed));
  for (size_t i = 0; i < lines.size() && i < kLines; i++) m.error += "\n  " + lines[i];
  if (lines.size() > kLines) m.error += format("\n  and %zu more", lines.size() - kLines);
}

// When only spinning threads are left, they poll once more: a plain store may have changed memory.
static bool poll_spinners() {
  Machine& m = machine();
  if (m.spinners.empty()) return false;
  m.poll_rounds = m.polled_at == m.resumed ? m.poll_rounds + 1 : 0;
  m.polled_at = m.resumed;
  if (m.poll_rounds > 2) return false;
  wake_spinners();
  return true;
}

void abandon_all() {
  Machine& m = machine();
  m.ready.clear(), m.spinners.clear(), m.postponed.clear(), m.asyncs.clear();
  for (auto& launch : m.queue) {
    for (auto& cluster : launch->resident) free_cluster(*cluster);
  }
  m.queue.clear();
  m.current = nullptr, m.current_async = nullptr, m.exiting = nullptr;
}

static void report_overdue() {
  Machine& m = machine();
  m.error = format("%s does not end: it has taken more than %llu steps (seed %llu)", m.queue.front()->kernel->symbol,
                   0ull + m.watchdog.step_limit, 0ull + m.seed);
}

static void start_clusters() {
  for (auto& launch : machine().queue) {
    while (launch->next_cluster < launch->clusters && launch->resident.size() < launch->resident_limit && launch->may_start()) {
      start_cluster(*launch);
    }
  }
}

// The oldest launch completes once its asynchronous operations have also run.
static bool complete_oldest() {
  Machine& m = machine();
  Launch& oldest = *m.queue.front();
  if (!oldest.complete()) return false;
  for (size_t i = 0; i < m.asyncs.size(); i++) {
    if (m.asyncs[i]->launch == &oldest) return false;
  }
  if (m.queue.size() > 1) {
    m.queue[1]->previous = nullptr;
    wake_all(m.queue[1]->waiting_for_previous);
  }
  m.queue.pop_front();
  return true;
}

// Whether the thread is slow for now. This depends on indices alone, so a seed gives the same order again.
static bool is_slow(const Machine& m, const Thread& thread) {
  uint64_t who = thread.cta->cluster->index + 1;
  if (m.slow == Machine::Slow::kNone) return false;
  if (m.slow != Machine::Slow::kClusters) who = who << 8 | thread.warp->agent;
  if (m.slow == Machine::Slow::kLanes) who = who << 8 | thread.lane;
  return ((who ^ m.slow_salt) * 0x9e3779b97f4a7c15u >> 32) % 3 == 0;
}

static Thread* pick(Machine& m) {
  if (m.resumed >= m.slow_until) {
    m.slow = static_cast<Machine::Slow>(m.random.below(4));
    m.slow_salt = m.random.next();
    m.slow_until = m.resumed + (64u << m.random.below(16));
  }
  if (!m.newest_first) std::swap(m.ready[m.random.below(m.ready.size())], m.ready.back());
  constexpr int kTries = 16;
  for (int i = 0; i < kTries && is_slow(m, *m.ready.back()); i++) std::swap(m.ready[m.random.below(m.ready.size())], m.ready.back());
  Thread* thread = m.ready.back();
  m.ready.pop_back();
  return thread;
}

// From now on the seed of the oldest launch determines the order, and the character of that order.
static void begin_oldest() {
  Machine& m = machine();
  Launch& launch = *m.queue.front();
  if (launch.begun) return;
  launch.begun = true;
  m.seed = launch.seed;
  m.random.seed(launch.seed);
  m.watchdog.watch(launch.kernel->symbol, launch.seed);
  m.resumed = m.slow_until = m.poll_rounds = 0;
  m.newest_first = m.random.one_in(4);
  constexpr uint32_t kEagerness[] = {0, 1, 8, 64};
  m.async_one_in = kEagerness[m.random.below(4)];
}

// Runs launches until `keep` are left; false if one failed.
bool run_queue(size_t keep) {
  Machine& m = machine();
  const uint32_t agent_stack = m.stacks.take(kStackGuard);
  prepare(m.agent, m.stacks.at(agent_stack), kStackBytes, agent_main);
  m.watchdog.start();
  while (m.queue.size() > keep && m.error.empty()) {
    if (m.changed || m.ready.empty()) {
      m.changed = complete_oldest();
      if (m.changed) continue;
      begin_oldest();
      start_clusters();
    }
    if (m.watchdog.step()) {
      report_overdue();
      continue;
    }
    if (!m.asyncs.empty() && m.async_one_in && m.random.one_in(m.async_one_in) && run_async(m.random.below(m.asyncs.size()))) continue;
    if (m.ready.empty()) {
      if (!run_any_async() && !resume_postponed() && !poll_spinners()) report_deadlock();
      continue;
    }
    m.current = pick(m);
    m.resumed++;
    switch_context(m.scheduler, m.current->context);
    m.current = nullptr;
    if (m.exiting && m.error.empty()) remove_exited();
  }
  m.watchdog.stop();
  m.stacks.give(agent_stack);
  if (m.error.empty()) return true;
  m.error += source_of_frames();
  abandon_all();
  return false;
}

}  // namespace kl_emu
