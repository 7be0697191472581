#include "wgmma_queue.h"

#include <string.h>

#include "async_sm90.h"
#include "async_state.h"

namespace kl_emu {
namespace {

// A NaN that no arithmetic produces.
constexpr uint32_t kPoison = 0x7fa5eed5u;

Warpgroup& current_warpgroup() {
  auto& groups = state_of(current_cta()).warpgroups;
  const uint32_t index = current().index / kWarpgroupThreads;
  if (groups.empty()) groups.resize(current_cta().threads / kWarpgroupThreads);
  KL_EMU_CHECK(index < groups.size(), "wgmma by warp %u, which is in no whole warpgroup", current_warp().index);
  if (!groups[index]) groups[index] = std::make_unique<Warpgroup>(), groups[index]->index = index;
  return *groups[index];
}

uint32_t agent_of(const Warpgroup& group) { return kWgmmaAgents + group.index % 4; }

std::string name_of(const Cta& cta, const Warpgroup& group) {
  return format("wgmma of CTA (%u, %u, %u), warpgroup %u", cta.block.x, cta.block.y, cta.block.z, group.index);
}

// The index of a thread's accumulator i among the 64 rows and `cols` columns of the MMA.
inline uint32_t index_of(uint32_t thread, uint32_t i, uint32_t cols) {
  const uint32_t row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + thread % 4 * 2 + i % 2;
  return row * cols + col;
}

struct Execution : Async {
  Cta* cta;
  Warpgroup* group;

  // Each MMA that all threads have issued posts one of these, so the oldest is always complete.
  void run() override {
    const std::unique_ptr<Wgmma> mma = std::move(group->queue.front());
    group->queue.pop_front();
    uint16_t a[kWgmmaRows * kWgmmaK], b[256 * kWgmmaK];
    if (mma->a_in_registers) {
      memcpy(a, mma->a_values.data(), sizeof(a));
    } else {
      mma->operands[1].gather(cta->arena, a);
    }
    mma->operands[0].gather(cta->arena, b);
    // A row of an operand has 32 bytes: 16 bf16 elements, or 32 e4m3 elements.
    const MmaModel& model = mma->element == MmaElement::kE4m3 ? kWgmmaE4m3 : kWgmmaBf16;
    const int cols = static_cast<int>(mma->cols);
    mma_multiply(model, kWgmmaRows, cols, model.step, a, b, mma->accumulator->values.data(), mma->accumulate);
    const uint32_t agent = agent_of(*group);
    for (const WgmmaOperand& operand : mma->operands) {
      for (const auto& range : operand.ranges()) release_claim(*cta, range.address, range.bytes, false, agent);
    }
    group->executed++;
    release_async_to(group->done, agent);
    wake_all(group->waiting);
  }

  std::string describe() const override { return name_of(*cta, *group); }
};

// The first thread that issues an MMA describes it for all threads.
std::unique_ptr<Wgmma> begin(const Warpgroup& group, MmaElement element, uint32_t cols, uint64_t a, bool a_in_registers, uint64_t b,
                             bool b_mn_major, bool accumulate) {
  auto mma = std::make_unique<Wgmma>();
  mma->element = element, mma->cols = cols, mma->a = a, mma->b = b;
  mma->a_in_registers = a_in_registers, mma->b_mn_major = b_mn_major, mma->accumulate = accumulate;
  mma->operands.emplace_back(b, b_mn_major, cols, "B");
  if (a_in_registers) {
    mma->a_values.resize(kWgmmaRows * kWgmmaK);
  } else {
    mma->operands.emplace_back(a, false, kWgmmaRows, "A");
  }
  Cta& cta = current_cta();
  const std::string name = name_of(cta, group);
  for (const WgmmaOperand& operand : mma->operands) {
    for (const auto& range : operand.ranges()) claim(cta, range.address, range.bytes, 16, false, agent_of(group), name);
  }
  return mma;
}

// Registers are variables on fibers' stacks. The compiler announces accesses to them like memory accesses.
void check_registers(const void* address, uint32_t bytes, bool write) {
  const WgmmaThread& own = state_of(current()).wgmma;
  const auto* first = static_cast<const unsigned char*>(address);
  const auto overlaps = [&](const void* registers, uint32_t size) {
    const auto* begin = static_cast<const unsigned char*>(registers);
    return first < begin + size && begin < first + bytes;
  };
  for (const auto& output : own.outputs) {
    KL_EMU_CHECK(!overlaps(output.registers, output.accumulator->cols / 2 * sizeof(float)),
                 "an accumulator is %s while a wgmma on it is in flight", write ? "written" : "read");
  }
  if (!write) return;
  for (const auto& input : own.inputs) {
    KL_EMU_CHECK(!overlaps(input.registers, sizeof(input.values)), "a register of A is written while a wgmma that reads it is in flight");
  }
}

// Puts the thread's accumulators in flight, unless they already are.
std::shared_ptr<Accumulator> put_in_flight(WgmmaThread& own, Wgmma& mma, float* acc, uint64_t number) {
  const uint32_t thread = current().index % kWarpgroupThreads, cols = mma.cols;
  for (auto& output : own.outputs) {
    if (output.registers != acc) continue;
    KL_EMU_CHECK(output.accumulator->cols == cols, "wgmma with %u columns on accumulators of one with %u that is in flight", cols,
                 output.accumulator->cols);
    output.last = number;
    return output.accumulator;
  }
  KL_EMU_CHECK(own.fenced, "wgmma on registers that the thread could access, without wgmma_fence before it");
  auto accumulator = mma.accumulator;
  if (!accumulator) {
    accumulator = std::make_shared<Accumulator>();
    accumulator->cols = cols;
    accumulator->values.resize(kWgmmaRows * cols);
  }
  KL_EMU_CHECK(!accumulator->registers[thread], "wgmma on other accumulators than the rest of the warpgroup");
  accumulator->registers[thread] = acc;
  for (uint32_t i = 0; i < cols / 2; i++) {
    if (mma.accumulate) accumulator->values[index_of(thread, i, cols)] = acc[i];
    memcpy(acc + i, &kPoison, 4);
  }
  own.outputs.push_back({acc, number, accumulator});
  return accumulator;
}

// The thread has waited for all MMAs on these accumulators, so their values return to its registers.
void return_registers(const WgmmaThread::Output& output) {
  const uint32_t thread = current().index % kWarpgroupThreads, cols = output.accumulator->cols;
  for (uint32_t i = 0; i < cols / 2; i++) {
    uint32_t bits;
    memcpy(&bits, output.registers + i, 4);
    KL_EMU_CHECK(bits == kPoison, "accumulator %u was written while a wgmma on it was in flight", i);
    output.registers[i] = output.accumulator->values[index_of(thread, i, cols)];
  }
  output.accumulator->registers[thread] = nullptr;
}

void issue(float* acc, MmaElement element, uint32_t cols, uint64_t a, const uint32_t* a_registers, uint64_t b, bool b_mn_major,
           bool accumulate) {
  Warpgroup& group = current_warpgroup();
  WgmmaThread& own = state_of(current()).wgmma;
  const uint64_t number = own.issued++;
  const uint64_t place = number - group.executed;
  if (place == group.queue.size()) group.queue.push_back(begin(group, element, cols, a, a_registers != nullptr, b, b_mn_major, accumulate));
  Wgmma& mma = *group.queue[place];
  KL_EMU_CHECK(mma.element == element && mma.cols == cols && mma.a == a && mma.b == b && mma.a_in_registers == (a_registers != nullptr) &&
                   mma.b_mn_major == b_mn_major && mma.accumulate == accumulate,
               "wgmma with other operands than the rest of the warpgroup: descriptors 0x%llx, 0x%llx and 0x%llx, 0x%llx",
               static_cast<unsigned long long>(a), static_cast<unsigned long long>(b), static_cast<unsigned long long>(mma.a),
               static_cast<unsigned long long>(mma.b));
  const auto accumulator = put_in_flight(own, mma, acc, number);
  if (!mma.accumulator) mma.accumulator = accumulator;
  KL_EMU_CHECK(mma.accumulator == accumulator, "wgmma on other accumulators than the rest of the warpgroup");
  if (a_registers) {
    KL_EMU_CHECK(own.fenced, "wgmma with A in registers that the thread could access, without wgmma_fence before it");
    const uint32_t thread = current().index % kWarpgroupThreads, row = thread / 32 * 16 + thread % 32 / 4, k = thread % 4 * 2;
    WgmmaThread::Input input{a_registers, {}, number};
    for (uint32_t i = 0; i < 4; i++) {
      input.values[i] = a_registers[i];
      memcpy(&mma.a_values[(row + i % 2 * 8) * kWgmmaK + k + i / 2 * 8], &a_registers[i], 4);
    }
    own.inputs.push_back(input);
  }
  current().check_registers = check_registers;
  check_at_exit(current_cta());
  if (++mma.issued < kWarpgroupThreads) return;
  auto execution = std::make_unique<Execution>();
  execution->cta = &current_cta(), execution->group = &group;
  post(std::move(execution));
}

}  // namespace

namespace ptx {

void wgmma(float* acc, uint32_t cols, uint64_t a, const uint32_t* a_registers, uint64_t b, bool b_mn_major, bool accumulate) {
  issue(acc, MmaElement::kBf16, cols, a, a_registers, b, b_mn_major, accumulate);
}

void wgmma_e4m3(float* acc, uint32_t cols, uint64_t a, uint64_t b, bool accumulate) {
  issue(acc, MmaElement::kE4m3, cols, a, nullptr, b, false, accumulate);
}

void wgmma_fence() { state_of(current()).wgmma.fenced = true; }

void wgmma_commit() {
  WgmmaThread& own = state_of(current()).wgmma;
  own.groups.push_back(own.issued);
}

void wgmma_wait(uint32_t pending) {
  Warpgroup& group = current_warpgroup();
  WgmmaThread& own = state_of(current()).wgmma;
  while (own.groups.size() > pending) {
    const uint64_t needed = own.groups.front();
    wait_until(
        group.waiting, [&] { return group.executed >= needed; },
        [&] {
          const uint32_t issued = group.queue.empty() ? 0 : group.queue.front()->issued;
          return format("wgmma_wait<%u>: MMA %llu of warpgroup %u, which %u of %u threads have issued", pending,
                        static_cast<unsigned long long>(group.executed), group.index, issued, kWarpgroupThreads);
        });
    own.waited = needed;
    own.groups.pop_front();
  }
  acquire_from(group.done);
  for (size_t i = 0; i < own.inputs.size();) {
    const auto& input = own.inputs[i];
    KL_EMU_CHECK(memcmp(input.registers, input.values.data(), sizeof(input.values)) == 0,
                 "registers of A were written while a wgmma that reads them was in flight");
    if (input.last < own.waited) {
      own.inputs[i] = own.inputs.back();
      own.inputs.pop_back();
    } else {
      i++;
    }
  }
  for (size_t i = 0; i < own.outputs.size();) {
    if (own.outputs[i].last >= own.waited) {
      i++;
      continue;
    }
    return_registers(own.outputs[i]);
    own.outputs[i] = std::move(own.outputs.back());
    own.outputs.pop_back();
    own.fenced = false;
  }
  if (own.outputs.empty() && own.inputs.empty()) current().check_registers = nullptr;
}

}  // namespace ptx
}  // namespace kl_emu
