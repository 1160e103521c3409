#pragma once

#include <filesystem>
#include <string>

namespace tessera::testing {

// Replaces the system calls that write and read files (openat, pwrite, fsync, fallocate, rename,
// unlink, pread, close, link), and makes one of these calls fail. Tests link the library;
// LD_PRELOAD loads the library into other programs. Environment variables:
//
//   TESSERA_FAULT=CALL:K:ACTION  ACTION at the K-th call (1, 2, ...) of CALL; "any" is all calls
//   TESSERA_FAULT_UNDER=FOLDER   only calls on files below FOLDER count
//   TESSERA_FAULT_RANK=R         only calls in the process whose RANK is R count
//
// ACTION: kill (SIGKILL before the call), short (half of the bytes), zero (no bytes), slow (0.2 s
// late, later calls too), stall (1.5 s late), or an error that the call returns: EINTR, ENOSPC,
// EIO, EDQUOT, EPERM.

/// Makes one system call on a file below `folder` fail. Only one SystemCallFault may exist.
class SystemCallFault {
 public:
  SystemCallFault(const std::filesystem::path& folder, const std::string& fault);
  SystemCallFault(const SystemCallFault&) = delete;
  SystemCallFault& operator=(const SystemCallFault&) = delete;
  ~SystemCallFault();

  /// Returns the number of calls of a system call since construction.
  static int calls(const std::string& call);
};

}  // namespace tessera::testing
