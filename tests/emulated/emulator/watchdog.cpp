#include "watchdog.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "machine.h"

// Older C libraries have the field without its name.
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace kl_emu {
namespace {

void expired(int) {
  Watchdog& watchdog = machine().watchdog;
  if (watchdog.seen != watchdog.steps) {
    watchdog.seen = watchdog.steps;
    return;
  }
  if (write(STDERR_FILENO, watchdog.message, watchdog.message_bytes) < 0) _exit(EXIT_FAILURE);
  abort();
}

void set(timer_t timer, double seconds) {
  itimerspec spec{};
  spec.it_value.tv_sec = static_cast<time_t>(seconds);
  spec.it_value.tv_nsec = static_cast<long>((seconds - static_cast<double>(spec.it_value.tv_sec)) * 1e9);
  spec.it_interval = spec.it_value;
  timer_settime(timer, 0, &spec, nullptr);
}

}  // namespace

Watchdog::Watchdog() {
  struct sigaction action {};
  action.sa_handler = expired;
  action.sa_flags = SA_RESTART;
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGVTALRM;
  event.sigev_notify_thread_id = static_cast<int>(syscall(SYS_gettid));
  if (sigaction(SIGVTALRM, &action, nullptr) != 0 || timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) != 0) {
    perror("emulator: a timer");
    abort();
  }
}

Watchdog::~Watchdog() { timer_delete(timer); }

void Watchdog::watch(const char* symbol, uint64_t seed) {
  message_bytes = snprintf(message, sizeof(message), "%.128s does not end, in a loop without accesses to memory (seed %llu)\n", symbol,
                           static_cast<unsigned long long>(seed));
  last = steps + step_limit;
}

void Watchdog::start() {
  seen = steps;
  set(timer, patience_s);
}

void Watchdog::stop() { set(timer, 0.0); }

}  // namespace kl_emu

extern "C" void kl_emu_step_limit(uint64_t steps) { kl_emu::machine().watchdog.step_limit = steps; }

extern "C" void kl_emu_patience(double seconds) { kl_emu::machine().watchdog.patience_s = seconds; }
