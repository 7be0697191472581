// Ends launches that would never end by themselves.
#pragma once

#include <signal.h>
#include <stdint.h>
#include <time.h>

namespace kl_emu {

// Measures the CPU time of one host thread, by a timer whose signal goes to that thread. A launch that is overdue ends at its next access
// to memory or the next switch of fibers. A loop that reaches neither cannot be left, because the signal may have interrupted anything:
// a second signal ends the process, with a message that names the kernel.
struct Watchdog {
  double limit_s = 60.0;
  volatile sig_atomic_t overdue = 0;
  timer_t timer{};
  // What ends the process, written in advance: a signal handler cannot format it.
  char message[256];
  size_t message_bytes = 0;

  Watchdog();
  ~Watchdog();
  void watch(const char* symbol, uint64_t seed);
  void start();
  void stop();
};

}  // namespace kl_emu
