// Ends launches that would never end by themselves.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <time.h>

namespace kl_emu {

// Counts the steps of a launch: its accesses to memory and the turns of the scheduler. Both follow from the seed, so a launch that takes
// too many takes too many on every machine. A loop without steps cannot be counted, and cannot be left either, because a signal may
// interrupt anything. A timer ends the process, with a message that names the kernel, when the host thread has spent this much CPU time
// without a step; a launch that ends is far from that.
struct Watchdog {
  uint64_t step_limit = 1ull << 32;
  double patience_s = 60.0;
  // All steps so far, how many there were when the timer last expired, and how many there may be in all.
  volatile uint64_t steps = 0, seen = 0;
  uint64_t last = 0;
  timer_t timer{};
  // What ends the process, written in advance: a signal handler cannot format it.
  char message[256];
  size_t message_bytes = 0;

  Watchdog();
  ~Watchdog();
  // A launch has become the oldest: steps are counted from here.
  void watch(const char* symbol, uint64_t seed);
  // Counts a step; whether it is one too many.
  bool step() { return (steps = steps + 1) > last; }
  void start();
  void stop();
};

}  // namespace kl_emu
