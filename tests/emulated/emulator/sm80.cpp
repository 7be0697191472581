// The instructions of sm_80 and sm_89: flags between CTAs, cp.async, ldmatrix, mma.sync, ex2; and the built-ins that need the runtime.
#include "include/ptx/sm89.cuh"

#include <string.h>

#include "arithmetic.h"
#include "async_publication.h"
#include "machine.h"

using namespace kl_emu;

namespace {

uint3 to_uint3(const Dim& d) { return {d.x, d.y, d.z}; }
const KlEmuLaunch& shape() { return current_cta().cluster->launch->shape; }

}  // namespace

uint3 kl_emu::thread_index() { return {current().index, 0, 0}; }
uint3 kl_emu::block_index() { return to_uint3(current_cta().block); }
uint3 kl_emu::block_size() { return {current_cta().threads, 1, 1}; }
uint3 kl_emu::grid_size() { return {shape().grid[0], shape().grid[1], shape().grid[2]}; }

uint32_t shared_address(const void* p) { return to_shared_address(p); }

// --------------------------------------------------------------------------------------------------- atomics and flags

// Other CTAs may run between any two atomic operations, so a thread may yield at each.
template <class T, class F>
static T atomic(T* at, const char* operation, F f) {
  if (kl_emu::random().one_in(2)) yield_thread();
  KL_EMU_CHECK(reinterpret_cast<uintptr_t>(at) % sizeof(*at) == 0, "%s at %p, which is not aligned", operation, static_cast<void*>(at));
  check_global_write(at, sizeof(*at), operation);
  const T old = *at;
  *at = f(old);
  wake_spinners();
  postpone_cta();
  return old;
}

unsigned atomicAdd(unsigned* at, unsigned value) {
  return atomic(at, "atomicAdd", [=](unsigned old) { return old + value; });
}
unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  return atomic(at, "atomicAdd", [=](unsigned long long old) { return old + value; });
}
unsigned atomicOr(unsigned* at, unsigned value) {
  return atomic(at, "atomicOr", [=](unsigned old) { return old | value; });
}
unsigned atomicExch(unsigned* at, unsigned value) {
  return atomic(at, "atomicExch", [=](unsigned) { return value; });
}
unsigned atomicInc(unsigned* at, unsigned last) {
  return atomic(at, "atomicInc", [=](unsigned old) { return old >= last ? 0 : old + 1; });
}
unsigned atomicMax(unsigned* at, unsigned value) {
  return atomic(at, "atomicMax", [=](unsigned old) { return old < value ? value : old; });
}

void store_release(uint32_t* to, uint32_t v) {
  check_global_write(to, sizeof(*to), "st.release");
  note_release(to, v);
  *to = v;
  wake_spinners();
  postpone_cta();
}

void add_release(uint32_t* to, uint32_t v) {
  check_global_write(to, sizeof(*to), "red.release");
  note_release_add(to, v);
  *to += v;
  wake_spinners();
  postpone_cta();
}

uint32_t load_acquire(const uint32_t* from) {
  check_global_read(from, sizeof(*from), "ld.acquire");
  Thread& thread = current();
  // It reads the same value at the same address again: the thread spins, and waits until some flag has changed.
  if (thread.spin_address == from && thread.spin_value == *from) spin(from, *from);
  if (thread.spin_address != from || thread.spin_value != *from) note_progress();
  thread.spin_address = from, thread.spin_value = *from;
  note_acquire(from, *from);
  return *from;
}

// -------------------------------------------------------------------------------------------------------------- arithmetic

float __fadd_rn(float a, float b) { return a + b; }
float __fmul_rn(float a, float b) { return a * b; }

float exp2_approx(float v) {
  const float result = exp2f(v);
  return fabsf(result) < 0x1p-126f ? 0.0f : result;
}

// ---------------------------------------------------------------------------------------------------------------- cp.async

namespace {

constexpr uint32_t kCopyBytes = 16;

struct Copy {
  uint32_t to;
  const void* from;  // null for zero fill
  bool done;
};

struct CopyGroup {
  std::vector<Copy> copies;
};

// The copies of a thread: committed groups, oldest first, and the open one.
struct Copies {
  std::deque<CopyGroup> committed;
  CopyGroup open;
};

// The bytes arrive now. They stay marked as being written until the thread has waited for them. Nobody may read them earlier.
void perform(Cta& cta, Copy& copy) {
  if (copy.done) return;
  copy.done = true;
  unsigned char* to = cta.arena + copy.to;
  if (copy.from) {
    memcpy(to, copy.from, kCopyBytes);
  } else {
    memset(to, 0, kCopyBytes);
  }
}

}  // namespace

void cp_async(uint32_t to, const void* from, bool valid) {
  Thread& thread = current();
  begin_async_write(*thread.cta, to, kCopyBytes, kCopyBytes, "cp.async");
  KL_EMU_CHECK(reinterpret_cast<uintptr_t>(from) % kCopyBytes == 0, "cp.async from %p, which is not aligned to 16 bytes", from);
  if (valid) check_global_read(from, kCopyBytes, "cp.async");
  CopyGroup& open = extension<Copies>(thread.sm80).open;
  open.copies.push_back({to, valid ? from : nullptr, false});
  // Each copy arrives now or when the thread waits for it.
  if (kl_emu::random().one_in(2)) perform(*thread.cta, open.copies.back());
}

void cp_async_commit() {
  Copies& copies = extension<Copies>(current().sm80);
  copies.committed.push_back(std::move(copies.open));
  copies.open = {};
}

void kl_emu::wait_for_copies(uint32_t pending) {
  Thread& thread = current();
  Copies& copies = extension<Copies>(thread.sm80);
  while (copies.committed.size() > pending) {
    for (Copy& copy : copies.committed.front().copies) {
      perform(*thread.cta, copy);
      end_async_write(*thread.cta, copy.to, kCopyBytes);
    }
    copies.committed.pop_front();
  }
}

// ---------------------------------------------------------------------------------------------------------------- ldmatrix

namespace {

struct LoadMatrix {
  uint32_t address;
  uint32_t* to;
};

template <bool kTransposed>
void load_matrices(void* const* lanes, uint32_t) {
  Cta& cta = current_cta();
  for (uint32_t i = 0; i < 4; i++) {
    uint16_t matrix[8][8];
    for (uint32_t row = 0; row < 8; row++) {
      const uint32_t address = static_cast<const LoadMatrix*>(lanes[8 * i + row])->address;
      read_shared_ahead(cta, address, matrix[row], sizeof(matrix[row]), sizeof(matrix[row]), "ldmatrix");
    }
    for (uint32_t lane = 0; lane < kLanes; lane++) {
      const uint32_t row = lane / 4, col = lane % 4 * 2;
      const uint32_t low = kTransposed ? matrix[col][row] : matrix[row][col];
      const uint32_t high = kTransposed ? matrix[col + 1][row] : matrix[row][col + 1];
      static_cast<LoadMatrix*>(lanes[lane])->to[i] = low | high << 16;
    }
  }
}

}  // namespace

void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  LoadMatrix own{address, r};
  warp_collective("ldmatrix", kAllLanes, &own, load_matrices<false>);
}

void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  LoadMatrix own{address, r};
  warp_collective("ldmatrix.trans", kAllLanes, &own, load_matrices<true>);
}

// -------------------------------------------------------------------------------------------------------------------- mma

namespace {

struct Mma {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

// An operand has 32 bytes of K: sixteen bf16 elements, or 32 e4m3 elements.
void multiply(void* const* lanes, const MmaModel& model) {
  constexpr int kM = 16, kN = 8, kBytes = 32;
  uint8_t a[kM][kBytes], b[kN][kBytes];
  float d[kM][kN];
  for (uint32_t lane = 0; lane < kLanes; lane++) {
    const Mma& own = *static_cast<const Mma*>(lanes[lane]);
    const uint32_t row = lane / 4, at = lane % 4 * 4;
    for (uint32_t i = 0; i < 4; i++) memcpy(&a[row + i % 2 * 8][at + i / 2 * 16], &own.a[i], sizeof(own.a[i]));
    for (uint32_t i = 0; i < 2; i++) memcpy(&b[row][at + i * 16], &own.b[i], sizeof(own.b[i]));
    for (uint32_t e = 0; e < 4; e++) d[row + e / 2 * 8][lane % 4 * 2 + e % 2] = own.d[e];
  }
  const int k = model.element == MmaElement::kBf16 ? kBytes / 2 : kBytes;
  mma_multiply(model, kM, kN, k, a, b, d[0], true);
  for (uint32_t lane = 0; lane < kLanes; lane++) {
    const Mma& own = *static_cast<const Mma*>(lanes[lane]);
    for (uint32_t e = 0; e < 4; e++) own.d[e] = d[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2];
  }
}

void multiply_bf16(void* const* lanes, uint32_t) { multiply(lanes, shape().capability < 90 ? kMmaBf16Sm80 : kMmaBf16Sm90); }

void multiply_e4m3(void* const* lanes, uint32_t) {
  const uint32_t capability = shape().capability;
  KL_EMU_CHECK(capability >= 89, "mma.e4m3 on a GPU of compute capability %u", capability);
  multiply(lanes, capability < 90 ? kMmaE4m3Sm89 : capability < 120 ? kMmaE4m3Sm90 : kMmaE4m3Sm120);
}

}  // namespace

void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma own{d, a, {b0, b1}};
  warp_collective("mma", kAllLanes, &own, multiply_bf16);
}

void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma own{d, a, {b0, b1}};
  warp_collective("mma.e4m3", kAllLanes, &own, multiply_e4m3);
}
