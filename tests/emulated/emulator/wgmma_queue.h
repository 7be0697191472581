// The MMAs of a warpgroup: its 128 threads issue them, they run in order at random moments, and threads wait for them by commit groups.
#pragma once

#include <stdint.h>

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "arithmetic.h"
#include "runtime.h"
#include "wgmma_descriptor.h"

namespace kl_emu {

constexpr uint32_t kWarpgroupThreads = 128;

// Accumulators while MMAs on them are in flight. Their registers hold a poison pattern, and this struct holds the values.
struct Accumulator {
  uint32_t cols;
  std::array<float*, kWarpgroupThreads> registers{};
  std::vector<float> values;  // kWgmmaRows x cols
};

struct Wgmma {
  MmaElement element;
  uint32_t cols;
  uint64_t a, b;  // descriptors; A has none if it is in registers
  bool a_in_registers, b_mn_major, accumulate;
  uint32_t issued = 0;  // threads
  std::shared_ptr<Accumulator> accumulator;
  std::vector<WgmmaOperand> operands;  // in shared memory
  std::vector<uint16_t> a_values;      // of A in registers: kWgmmaRows x kWgmmaK
};

struct Warpgroup {
  uint32_t index = 0;  // in the CTA
  uint64_t executed = 0;
  std::deque<std::unique_ptr<Wgmma>> queue;  // the first is MMA number `executed`
  Clock done;
  WaitList waiting;
};

// The MMAs that a thread has issued.
struct WgmmaThread {
  uint64_t issued = 0, waited = 0;  // MMAs
  std::deque<uint64_t> groups;      // for each commit group that was not waited for: the number of MMAs issued before its end
  bool fenced = false;              // no register was written since the last wgmma_fence
  // Registers that MMAs use, and the last MMA that uses them.
  struct Output {
    float* registers;
    uint64_t last;
    std::shared_ptr<Accumulator> accumulator;
  };
  struct Input {
    const uint32_t* registers;
    std::array<uint32_t, 4> values;
    uint64_t last;
  };
  std::vector<Output> outputs;
  std::vector<Input> inputs;
};

}  // namespace kl_emu
