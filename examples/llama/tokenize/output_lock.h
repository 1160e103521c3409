#pragma once

#include <string>

namespace llama {

/// One process at a time writes the shards of a PREFIX: it holds a lock on PREFIX.lock, which is
/// removed at the end. A file that a killed process has left locks nobody out, and file systems
/// without locks let everybody in.
class OutputLock {
 public:
  /// Throws Error where another process has the lock, or the file can't be made.
  explicit OutputLock(const std::string& prefix);
  ~OutputLock();
  OutputLock(const OutputLock&) = delete;
  OutputLock& operator=(const OutputLock&) = delete;

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace llama
