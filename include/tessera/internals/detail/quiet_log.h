// Filters libtorch's log: beside an error that the library reports in one line, libtorch's stores
// and NCCL groups print pages. The log has one level for the process and no filter, and libtorch's
// threads write at any time. Each message goes to std::cerr in one piece: so the filter replaces
// its buffer, and holds back by severity and source file.
//
// No version differs in the form of a line or the names of the files.
//
// Canary: QuietLogCanary.
#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// While one exists, noise is held back and all else is shown. TORCH_CPP_LOG_LEVEL takes precedence
/// if it is set. Thread safe.
class QuietLog {
 public:
  QuietLog();
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;
  ~QuietLog();
};

/// Has TORCH_CPP_LOG_LEVEL count, which libtorch leaves to Python.
void read_log_level();

}  // namespace tessera::detail
TESSERA_API_END
