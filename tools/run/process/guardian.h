#pragma once

#include <sys/types.h>

#include <string>

#include "file_descriptor.h"

namespace tessera::run {

/// A small process that outlives the launcher and ends the ranks' process groups if the launcher is
/// killed. The kernel ends the ranks themselves then, but not the processes that they started.
class Guardian {
 public:
  /// Must be made before the first rank and while the process has one thread. `folder`: goes with
  /// a launcher that is killed if it is still empty then; "": none.
  explicit Guardian(const std::string& folder);
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  void watch(pid_t group);
  /// Must be called before the group's number can be given to another: before its leader is waited
  /// for.
  void forget(pid_t group);
  pid_t pid() const { return pid_; }

 private:
  void send(pid_t message);

  pid_t pid_ = -1;
  FileDescriptor messages_;
};

}  // namespace tessera::run
