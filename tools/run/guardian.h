#pragma once

#include <sys/types.h>

#include "file_descriptor.h"

namespace tessera::run {

/// A small process that outlives the launcher to end the ranks' process groups when the launcher
/// is killed. The kernel ends the ranks themselves then, but not what they started.
class Guardian {
 public:
  /// Must be made before the first rank and while the process has one thread.
  Guardian();
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  void watch(pid_t group);
  /// To be called while the group's number cannot have been given to another.
  void forget(pid_t group);
  pid_t pid() const { return pid_; }

 private:
  void send(pid_t message);

  pid_t pid_ = -1;
  FileDescriptor messages_;
};

}  // namespace tessera::run
