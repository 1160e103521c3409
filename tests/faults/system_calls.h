#pragma once

#include <filesystem>
#include <string>

namespace tessera::testing {

// A library that stands before the system calls by which files are written and read, and makes one
// of them go wrong: openat, pwrite, fsync, fallocate, rename, unlink, pread, close, link. Linked
// into a test, or preloaded into any program, which environment variables then control:
//
//   TESSERA_FAULT=CALL:K:ACTION  at the K-th call (1, 2, ...) of this name; "any" counts them all
//   TESSERA_FAULT_UNDER=FOLDER   calls on files of other folders are left alone and not counted
//   TESSERA_FAULT_RANK=R         in the process whose RANK is R alone
//
// ACTION: kill (SIGKILL before the call), short (half of the bytes), zero (no bytes), slow (this
// and each later one 0.2 s late), stall (1.5 s late), or the name of an error that the call then
// returns without doing anything: EINTR, ENOSPC, EIO, EDQUOT, EPERM.

/// A fault in the calls of this process on files below `folder`, while this exists. One at a time.
class SystemCallFault {
 public:
  SystemCallFault(const std::filesystem::path& folder, const std::string& fault);
  SystemCallFault(const SystemCallFault&) = delete;
  SystemCallFault& operator=(const SystemCallFault&) = delete;
  ~SystemCallFault();

  /// The number of calls of this name since construction.
  static int calls(const std::string& call);
};

}  // namespace tessera::testing
