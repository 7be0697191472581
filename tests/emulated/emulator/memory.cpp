// Memory: the shared memory of CTAs with what is known about each byte, the allocations of global memory, and the checks of plain accesses.
// With -fsanitize=thread,alignment the compiler announces every memory access by calling a __tsan function, and misaligned ones by another
// function. This file defines them; no sanitizer is linked.
#include <string.h>

#include <algorithm>

#include "machine.h"

namespace kl_emu {

namespace {

// A shadow byte per byte of shared memory. It says whether the byte was written, whether an asynchronous operation writes it, how many such
// operations read it (in units of kReading), or that it belongs to no variable.
constexpr uint8_t kInitialized = 1, kWriting = 2, kReading = 4, kReaders = 0x7c, kOutside = 0x80;
// The least gap before each static variable. Its bytes belong to no variable.
constexpr uint32_t kGap = 64;
// Fills shared memory before a CTA starts: a NaN in every floating-point type.
constexpr int kPoison = 0xff;

uint32_t stamp_of(uint32_t agent, uint32_t time) { return (agent + 1) << kStampTimeBits | (time & kStampTime); }

// The agent that accesses memory: the running thread's warp, or asynchronous operations.
struct Accessor {
  uint32_t agent, stamp;
  const Clock* clock;  // null for asynchronous operations, which were checked when they were issued

  // `async` is the agent of asynchronous operations, which accesses memory if no thread runs.
  explicit Accessor(uint32_t async = 0) {
    Machine& m = machine();
    if (m.current) {
      const Warp& warp = *m.current->warp;
      agent = warp.agent, clock = &warp.clock;
      stamp = stamp_of(agent, warp.clock.time[agent]);
    } else {
      agent = Clock::kWarps + async, clock = nullptr;
      stamp = stamp_of(agent, m.async_time);
    }
  }

  // Whether the access with this stamp happened before.
  bool ordered_after(uint32_t earlier) const {
    if (earlier == 0 || !clock) return true;
    const uint32_t other = (earlier >> kStampTimeBits) - 1;
    return other == agent || (earlier & kStampTime) <= (clock->time[other] & kStampTime);
  }
};

std::string agent_text(uint32_t stamp, const Cta& cta) {
  const uint32_t agent = (stamp >> kStampTimeBits) - 1;
  if (agent >= Clock::kWarps) return async_agent_text(agent - Clock::kWarps);
  const uint32_t warps = cta.warps.size();
  return cta.cluster->ctas.size() > 1 ? format("warp %u of the CTA of rank %u", agent % warps, agent / warps) : format("warp %u", agent);
}

// The stamps of all words in an access.
struct StampRange {
  Stamps *begin, *end;
  StampRange(Cta& cta, uint32_t address, uint32_t bytes) : begin(cta.stamps + address / 4), end(cta.stamps + (address + bytes + 3) / 4) {}
};

// With `stamp`, the read is stamped as the calling warp's. An asynchronous read is stamped when it ends.
void check_read_order(Cta& cta, uint32_t address, uint32_t bytes, const char* operation, bool stamp = true) {
  const Accessor who;
  const StampRange words(cta, address, bytes);
  for (Stamps* word = words.begin; word < words.end; word++) {
    KL_EMU_CHECK(who.ordered_after(word->write), "race: %s reads shared memory +0x%x, which %s wrote, without a barrier between them",
                 operation, address, agent_text(word->write, cta).c_str());
    if (stamp) word->read[who.agent % Stamps::kReaders] = who.stamp;
  }
}

void check_write_order(Cta& cta, uint32_t address, uint32_t bytes, const char* operation) {
  const Accessor who;
  const StampRange words(cta, address, bytes);
  for (Stamps* word = words.begin; word < words.end; word++) {
    KL_EMU_CHECK(who.ordered_after(word->write), "race: %s writes shared memory +0x%x, which %s wrote, without a barrier between them",
                 operation, address, agent_text(word->write, cta).c_str());
    for (uint32_t& read : word->read) {
      KL_EMU_CHECK(who.ordered_after(read), "race: %s writes shared memory +0x%x, which %s read, without a barrier between them", operation,
                   address, agent_text(read, cta).c_str());
      read = 0;
    }
    word->write = who.stamp;
  }
}

// Whether all shadow bytes, masked, have this value.
bool all_bytes(const uint8_t* shadow, uint32_t bytes, uint8_t mask, uint8_t value) {
  uint32_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    uint64_t eight;
    memcpy(&eight, shadow + i, 8);
    if ((eight & mask * 0x0101010101010101u) != value * 0x0101010101010101u) return false;
  }
  for (; i < bytes; i++) {
    if ((shadow[i] & mask) != value) return false;
  }
  return true;
}

void check_inside(Cta& cta, uint32_t address, uint32_t bytes, const char* operation) {
  for (uint32_t i = 0; i < bytes; i++) {
    KL_EMU_CHECK(!(cta.shadow[address + i] & kOutside), "%s accesses shared memory +0x%x, beyond the variable before it", operation,
                 address + i);
  }
}

void check_settled(Cta& cta, uint32_t address, uint32_t bytes, const char* operation) {
  const uint8_t* shadow = cta.shadow + address;
  if (all_bytes(shadow, bytes, kWriting | kOutside, 0)) return;
  check_inside(cta, address, bytes, operation);
  for (uint32_t i = 0; i < bytes; i++) {
    KL_EMU_CHECK(!(shadow[i] & kWriting), "%s reads shared memory +0x%x while an asynchronous operation writes it", operation,
                 address + i);
  }
}

void check_readable(Cta& cta, uint32_t address, uint32_t bytes, const char* operation) {
  const uint8_t* shadow = cta.shadow + address;
  if (all_bytes(shadow, bytes, kInitialized | kWriting | kOutside, kInitialized)) return;
  check_settled(cta, address, bytes, operation);
  for (uint32_t i = 0; i < bytes; i++) {
    KL_EMU_CHECK(shadow[i] & kInitialized, "%s reads shared memory +0x%x, which was never written", operation, address + i);
  }
}

void check_writable(Cta& cta, uint32_t address, uint32_t bytes, const char* operation) {
  const uint8_t* shadow = cta.shadow + address;
  if (all_bytes(shadow, bytes, static_cast<uint8_t>(~kInitialized), 0)) return;
  check_inside(cta, address, bytes, operation);
  for (uint32_t i = 0; i < bytes; i++) {
    KL_EMU_CHECK(!(shadow[i] & kWriting), "%s writes shared memory +0x%x while an asynchronous operation writes it", operation,
                 address + i);
    KL_EMU_CHECK(!(shadow[i] & kReaders), "%s writes shared memory +0x%x while an asynchronous operation reads it", operation, address + i);
  }
}

}  // namespace

// --------------------------------------------------------------------------------------------------------- happens-before

void Clock::join(const Clock& other) {
  for (uint32_t i = 0; i < kAgents; i++) time[i] = std::max(time[i], other.time[i]);
}

void release_to(Clock& clock) {
  Warp& warp = current_warp();
  clock.join(warp.clock);
  warp.clock.time[warp.agent]++;
}

void acquire_from(const Clock& clock) { current_warp().clock.join(clock); }

void release_async_to(Clock& clock, uint32_t agent) {
  uint32_t& time = clock.time[Clock::kWarps + agent];
  time = std::max(time, machine().async_time++);
}

// ---------------------------------------------------------------------------------------------------------- shared memory

static void clear(Cta& cta, uint32_t address, uint32_t bytes) {
  memset(cta.arena + address, kPoison, bytes);
  memset(cta.shadow + address, 0, bytes);
  memset(cta.stamps + address / 4, 0, (bytes + 3) / 4 * sizeof(Stamps));
}

void open_arena(Cta& cta, uint32_t dynamic_bytes) {
  Machine& m = machine();
  cta.arena_slot = m.arenas.take(0);
  m.arena_owners[cta.arena_slot] = &cta;
  cta.arena = m.arenas.at(cta.arena_slot);
  cta.shadow = cta.arena + kArenaBytes;
  cta.stamps = reinterpret_cast<Stamps*>(cta.arena + 2 * kArenaBytes);
  cta.dynamic_bytes = dynamic_bytes;
  cta.shared_end = kSharedBase + dynamic_bytes;
  clear(cta, kSharedBase, dynamic_bytes);
}

void close_arena(Cta& cta) {
  machine().arena_owners[cta.arena_slot] = nullptr;
  machine().arenas.give(cta.arena_slot);
}

void check_arena_idle(Cta& cta) {
  for (uint32_t a = kSharedBase; a < cta.shared_end; a++) {
    KL_EMU_CHECK(!(cta.shadow[a] & (kWriting | kReaders)), "the CTA ends while an asynchronous operation %s its shared memory +0x%x",
                 cta.shadow[a] & kWriting ? "writes" : "reads", a);
  }
}

// Places a static variable of a kernel behind the existing ones, when the first thread reaches its declaration.
void* static_shared(const void* key, uint32_t bytes, uint32_t alignment) {
  Cta& cta = current_cta();
  for (auto& [known, address] : cta.static_variables) {
    if (known == key) return cta.arena + address;
  }
  cta.static_bytes += bytes;
  KL_EMU_CHECK(cta.dynamic_bytes + cta.static_bytes <= kSharedLimit,
               "%u bytes of dynamic and %u of static shared memory; at most %u are possible", cta.dynamic_bytes, cta.static_bytes,
               kSharedLimit);
  const uint32_t address = (cta.shared_end + kGap + alignment - 1) / alignment * alignment;
  KL_EMU_CHECK(address + bytes <= kArenaBytes, "static shared memory and its gaps do not fit");
  memset(cta.shadow + cta.shared_end, kOutside, address - cta.shared_end);
  clear(cta, address, bytes);
  cta.shared_end = address + bytes;
  cta.static_variables.emplace_back(key, address);
  return cta.arena + address;
}

unsigned char* dynamic_shared_memory() { return current_cta().arena + kSharedBase; }

uint32_t to_shared_address(const void* pointer) {
  const Cta& cta = current_cta();
  const uint64_t offset = static_cast<const unsigned char*>(pointer) - cta.arena;
  KL_EMU_CHECK(offset >= kSharedBase && offset <= cta.shared_end, "%p is no address in the CTA's shared memory", pointer);
  return static_cast<uint32_t>(offset);
}

unsigned char* shared_pointer(Cta& cta, uint32_t address, uint32_t bytes, uint32_t alignment, const char* operation) {
  KL_EMU_CHECK(address % alignment == 0, "%s at shared memory +0x%x, which is not aligned to %u bytes", operation, address, alignment);
  KL_EMU_CHECK(address >= kSharedBase && static_cast<uint64_t>(address) + bytes <= cta.shared_end,
               "%s of %u bytes at shared memory +0x%x, beyond the CTA's +0x%x to +0x%x", operation, bytes, address, kSharedBase,
               cta.shared_end);
  return cta.arena + address;
}

static void access_shared(Cta& cta, uint32_t address, uint32_t bytes, bool write, const char* operation) {
  if (write) {
    check_writable(cta, address, bytes, operation);
    check_write_order(cta, address, bytes, operation);
    memset(cta.shadow + address, kInitialized, bytes);
  } else {
    check_readable(cta, address, bytes, operation);
    check_read_order(cta, address, bytes, operation);
  }
}

void read_shared(Cta& cta, uint32_t address, void* to, uint32_t bytes, uint32_t alignment, const char* operation) {
  const unsigned char* from = shared_pointer(cta, address, bytes, alignment, operation);
  access_shared(cta, address, bytes, false, operation);
  memcpy(to, from, bytes);
}

void read_shared_ahead(Cta& cta, uint32_t address, void* to, uint32_t bytes, uint32_t alignment, const char* operation) {
  const unsigned char* from = shared_pointer(cta, address, bytes, alignment, operation);
  check_settled(cta, address, bytes, operation);
  check_read_order(cta, address, bytes, operation);
  memcpy(to, from, bytes);
}

void write_shared(Cta& cta, uint32_t address, const void* from, uint32_t bytes, uint32_t alignment, const char* operation) {
  unsigned char* to = shared_pointer(cta, address, bytes, alignment, operation);
  access_shared(cta, address, bytes, true, operation);
  memcpy(to, from, bytes);
}

void begin_async_write(Cta& cta, uint32_t address, uint32_t bytes, uint32_t alignment, const char* operation) {
  shared_pointer(cta, address, bytes, alignment, operation);
  check_writable(cta, address, bytes, operation);
  check_write_order(cta, address, bytes, operation);
  for (uint32_t i = 0; i < bytes; i++) cta.shadow[address + i] |= kWriting;
}

void end_async_write(Cta& cta, uint32_t address, uint32_t bytes, uint32_t agent) {
  memset(cta.shadow + address, kInitialized, bytes);
  const uint32_t stamp = Accessor(agent).stamp;
  const StampRange words(cta, address, bytes);
  for (Stamps* word = words.begin; word < words.end; word++) word->write = stamp;
}

void begin_async_read(Cta& cta, uint32_t address, uint32_t bytes, uint32_t alignment, const char* operation) {
  shared_pointer(cta, address, bytes, alignment, operation);
  check_readable(cta, address, bytes, operation);
  check_read_order(cta, address, bytes, operation, false);
  for (uint32_t i = 0; i < bytes; i++) {
    KL_EMU_CHECK((cta.shadow[address + i] & kReaders) != kReaders, "too many asynchronous operations read shared memory +0x%x",
                 address + i);
    cta.shadow[address + i] += kReading;
  }
}

void end_async_read(Cta& cta, uint32_t address, uint32_t bytes, uint32_t agent) {
  for (uint32_t i = 0; i < bytes; i++) cta.shadow[address + i] -= kReading;
  const Accessor who(agent);
  const StampRange words(cta, address, bytes);
  for (Stamps* word = words.begin; word < words.end; word++) word->read[who.agent % Stamps::kReaders] = who.stamp;
}

void mark_initialized(Cta& cta, uint32_t address, uint32_t bytes) { memset(cta.shadow + address, kInitialized, bytes); }

// ---------------------------------------------------------------------------------------------------------- global memory

// Whether [address, address + bytes) lies in one allocation. Remembers that allocation.
static bool allocated(Machine& m, uint64_t address, uint64_t bytes) {
  if (address - m.last_begin < m.last_end - m.last_begin && address + bytes <= m.last_end) return true;
  auto next = m.allocations.upper_bound(address);
  if (next == m.allocations.begin()) return false;
  --next;
  if (address + bytes > next->second) return false;
  m.last_begin = next->first, m.last_end = next->second;
  return true;
}

// Kernels may read kernel parameters and the program's constants, but not write them.
extern "C" const char __executable_start, end;

static bool constant(Machine& m, uint64_t address, uint64_t bytes) {
  if (m.current) {
    const Launch& launch = *m.current->cta->cluster->launch;
    const uint64_t params = reinterpret_cast<uint64_t>(launch.params);
    if (address >= params && address + bytes <= params + launch.kernel->param_bytes) return true;
  }
  return address >= reinterpret_cast<uint64_t>(&__executable_start) && address < reinterpret_cast<uint64_t>(&end);
}

static std::string nearest(Machine& m, uint64_t address) {
  if (m.allocations.empty()) return "nothing is allocated";
  auto next = m.allocations.upper_bound(address);
  if (next != m.allocations.begin()) --next;
  const uint64_t begin = next->first, size = next->second - begin;
  if (address < begin) return format("%llu bytes before an allocation of %llu bytes", 0ull + begin - address, 0ull + size);
  return format("at byte %llu of an allocation of %llu bytes", 0ull + address - begin, 0ull + size);
}

void check_global_read(const void* pointer, uint64_t bytes, const char* operation) {
  Machine& m = machine();
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (allocated(m, address, bytes) || constant(m, address, bytes)) return;
  fail("%s of %llu bytes reads global memory that is not allocated: %p, %s", operation, 0ull + bytes, pointer,
       nearest(m, address).c_str());
}

void check_global_write(const void* pointer, uint64_t bytes, const char* operation) {
  Machine& m = machine();
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (!allocated(m, address, bytes)) {
    KL_EMU_CHECK(!constant(m, address, bytes), "%s writes kernel parameters or constants: %p", operation, pointer);
    fail("%s of %llu bytes writes global memory that is not allocated: %p, %s", operation, 0ull + bytes, pointer,
         nearest(m, address).c_str());
  }
  if (!m.current) return;
  const Cta& cta = *m.current->cta;
  KL_EMU_CHECK(!cta.cluster->launch->shape.overlap || cta.waited_for_previous,
               "%s writes global memory before wait_for_previous_kernel, while the previous kernel may still run", operation);
}

// ----------------------------------------------------------------------------------------------------------- plain accesses

static void plain_access(const void* pointer, uint32_t bytes, bool write) {
  Machine& m = machine();
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  // Stacks hold registers. Before main, while the kernel table is filled, there is no fiber.
  if (!m.current) return;
  KL_EMU_CHECK(!m.watchdog.step(), "does not end: the launch has taken more than %llu steps", 0ull + m.watchdog.step_limit);
  if (m.stacks.contains(address)) {
    if (m.current->check_registers) m.current->check_registers(pointer, bytes, write);
    return;
  }
  const char* operation = write ? "a store" : "a load";
  if (!m.arenas.contains(address)) {
    write ? check_global_write(pointer, bytes, operation) : check_global_read(pointer, bytes, operation);
    return;
  }
  const uint64_t offset = address - reinterpret_cast<uint64_t>(m.arenas.base);
  Cta* cta = m.arena_owners[offset / kArenaSlotBytes];
  KL_EMU_CHECK(cta == m.current->cta, "%s at shared memory of another CTA", operation);
  const uint32_t shared = static_cast<uint32_t>(offset % kArenaSlotBytes);
  shared_pointer(*cta, shared, bytes, 1, operation);
  access_shared(*cta, shared, bytes, write, operation);
}

}  // namespace kl_emu

using namespace kl_emu;

extern "C" void kl_emu_allocate(uint64_t address, uint64_t bytes) { machine().allocations[address] = address + bytes; }

extern "C" void kl_emu_free(uint64_t address) {
  Machine& m = machine();
  m.allocations.erase(address);
  m.last_begin = m.last_end = 0;
}

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define KL_EMU_ACCESS(bytes)                                                     \
  void __tsan_read##bytes(void* p) { plain_access(p, bytes, false); }            \
  void __tsan_write##bytes(void* p) { plain_access(p, bytes, true); }            \
  void __tsan_unaligned_read##bytes(void* p) { plain_access(p, bytes, false); }  \
  void __tsan_unaligned_write##bytes(void* p) { plain_access(p, bytes, true); }

KL_EMU_ACCESS(1)
KL_EMU_ACCESS(2)
KL_EMU_ACCESS(4)
KL_EMU_ACCESS(8)
KL_EMU_ACCESS(16)

void __tsan_read_range(void* p, unsigned long bytes) { plain_access(p, static_cast<uint32_t>(bytes), false); }
void __tsan_write_range(void* p, unsigned long bytes) { plain_access(p, static_cast<uint32_t>(bytes), true); }

// The source position that -fsanitize=alignment passes along with a pointer that is misaligned for its type.
struct MisalignedPlace {
  const char* file;
  uint32_t line, column;
  const void* type;
  uint8_t log_alignment, kind;
};

void __ubsan_handle_type_mismatch_v1(const MisalignedPlace* place, void* pointer) {
  fail("%s:%u: an access to %p, which is not aligned to %u bytes", place->file, place->line, pointer, 1u << place->log_alignment);
}
}
