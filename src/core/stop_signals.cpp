#include "tessera/core/stop_signals.h"

#include <signal.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace tessera {
namespace {

constexpr std::array kStopSignals = {SIGTERM, SIGUSR1};

// A handler reaches nothing but what is static.
std::atomic<bool> stop_came = false;
static_assert(std::atomic<bool>::is_always_lock_free, "a signal's handler may not wait for a lock");
std::array<struct sigaction, kStopSignals.size()> old_actions;

void note_stop(int /*signal*/) {
  stop_came = true;
}

}  // namespace

StopSignals::StopSignals() {
  stop_came = false;
  struct sigaction action {};
  action.sa_handler = note_stop;
  sigemptyset(&action.sa_mask);
  // Reads and writes continue: only the loop that checks reacts to a stop.
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kStopSignals.size(); ++i) {
    sigaction(kStopSignals[i], &action, &old_actions[i]);
  }
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kStopSignals.size(); ++i) {
    sigaction(kStopSignals[i], &old_actions[i], nullptr);
  }
}

bool StopSignals::received() const {
  return stop_came;
}

}  // namespace tessera
