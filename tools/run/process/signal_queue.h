// Signals as events of the supervisor's loop. They are blocked and read from a descriptor, so that
// no handler interrupts the loop and none is lost between two of its turns.

#pragma once

#include <signal.h>

#include <optional>

#include "file_descriptor.h"

namespace tessera::run {

/// The signals that the launcher acts on, taken from a descriptor instead of a handler.
class SignalQueue {
 public:
  SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;
  /// Signals act as before again: without ranks, one that asks for a stop ends the launcher.
  ~SignalQueue();

  int fd() const { return descriptor_.get(); }
  /// The next signal that has arrived, if any.
  std::optional<int> next();

 private:
  sigset_t before_{};
  FileDescriptor descriptor_;
};

/// True for those that end the job: SIGINT, SIGTERM, SIGHUP and SIGQUIT.
bool is_stop_signal(int signal);

}  // namespace tessera::run
