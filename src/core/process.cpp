#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <string_view>

#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/core/process.h"

namespace tessera::detail {

// Environment variables switch optional checks on and off. A misspelt value is an error: if such a
// value meant "off", a requested check would silently not run.

/// An empty variable counts as not set, because shells often clear a variable with NAME= .
std::optional<bool> environment_switch(const char* name) {
  static constexpr std::array<std::string_view, 3> kOn{"1", "true", "on"};
  static constexpr std::array<std::string_view, 3> kOff{"0", "false", "off"};
  const char* found = std::getenv(name);
  const std::string_view value = found == nullptr ? "" : found;
  if (value.empty()) {
    return std::nullopt;
  }
  const bool on = std::ranges::find(kOn, value) != kOn.end();
  TESSERA_CHECK(on || std::ranges::find(kOff, value) != kOff.end(), "environment variable ", name,
                "=", value, " is not boolean; set it to 1, true or on, or to 0, false or off");
  return on;
}

bool debug_checks(bool unset) {
  return environment_switch("TESSERA_DEBUG").value_or(unset);
}

}  // namespace tessera::detail

namespace tessera {
namespace {

constexpr std::array kStopSignals = {SIGTERM, SIGUSR1};

// Whether the process has received a stop signal. A signal handler can use only global variables.
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
  // SA_RESTART restarts interrupted reads and writes, so that only code that calls received()
  // notices a signal.
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

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tessera {
namespace {

[[maybe_unused]] bool chosen_by_user() {
  constexpr std::array kVariables = {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_",
                                     "MALLOC_MMAP_THRESHOLD_"};
  return std::ranges::any_of(kVariables,
                             [](const char* name) { return std::getenv(name) != nullptr; });
}

}  // namespace

void keep_freed_memory() {
#ifdef __GLIBC__
  if (chosen_by_user()) {
    return;
  }
  // glibc keeps free heap memory, and allocates blocks up to 1 GiB in the heap. Both limits are
  // set, because setting only one limit ends glibc's adjustment of both.
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
#endif
}

/// end_program() writes its message by a single call, so that lines of several ranks do not mix.
void end_program(const std::string& who, std::string message) {
  message.resize(std::min(message.find("\nException raised from "), message.size()));
  std::ranges::replace(message, '\n', ' ');
  std::cout << std::flush;
  std::cerr << who + ": " + message + "\n" << std::flush;
  std::_Exit(1);
}

}  // namespace tessera
