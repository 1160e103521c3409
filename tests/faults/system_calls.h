#pragma once

#include <filesystem>
#include <string>

namespace tessera::testing {

// A library that replaces the system calls by which files are written and read (openat, pwrite,
// fsync, fallocate, rename, unlink, pread, close, link), and makes one of these calls fail. A test
// links the library. Or a program preloads it and sets environment variables:
//
//   TESSERA_FAULT=CALL:K:ACTION  at the K-th call (1, 2, ...) of this name; "any" counts all calls
//   TESSERA_FAULT_UNDER=FOLDER   only calls on files below this folder count
//   TESSERA_FAULT_RANK=R         only in the process whose RANK is R
//
// ACTION: kill (SIGKILL before the call), short (half of the bytes), zero (no bytes), slow (this
// call and each later call 0.2 s late), stall (1.5 s late), or an error that the call returns
// without doing anything: EINTR, ENOSPC, EIO, EDQUOT, EPERM.

/// While a SystemCallFault exists, one system call below `folder` fails. At most one may exist.
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
