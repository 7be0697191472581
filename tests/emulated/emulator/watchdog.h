// Ends launches that would never end by themselves.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <time.h>

namespace kl_emu {

// Counts the steps of a launch: its memory accesses and the turns of the scheduler. Both follow from the seed, so a launch that takes too
// many steps does so on every machine. A loop without steps cannot be counted. It cannot be left either, because a signal may interrupt
// anything. A timer ends the process when the host thread has spent this much CPU time without a step, with a message that names the
// kernel. A launch that ends stays far below that.
struct Watchdog {
  uint64_t step_limit = 1ull << 32;
  double patience_s = 60.0;
  // All steps so far, the steps when the timer last expired, and the most steps there may be.
  volatile uint64_t steps = 0, seen = 0;
  uint64_t last = 0;
  timer_t timer{};
  // The message that ends the process. It is written in advance, because a signal handler cannot format it.
  char message[256];
  size_t message_bytes = 0;

  Watchdog();
  ~Watchdog();
  // Called when a launch has become the oldest. Counts its steps from here.
  void watch(const char* symbol, uint64_t seed);
  // Counts a step. True if it is one too many.
  bool step() { return (steps = steps + 1) > last; }
  void start();
  void stop();
};

}  // namespace kl_emu
