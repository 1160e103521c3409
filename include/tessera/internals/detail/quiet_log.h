// libtorch's log without what its stores and its NCCL groups say in pages beside an error of which
// the library makes one of a line. The log has one level for the process and no filter, and
// libtorch's threads write when they like. All of it goes to std::cerr, a message in one piece: so
// a filter stands there, and holds back by severity and source file.
//
// No version differs in the form of a line or the names of the files.
//
// Canary: QuietLogCanary.
#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// While one exists, what is noise is held back and all else is shown. TORCH_CPP_LOG_LEVEL, if it
/// is set, has the last word. Thread safe.
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
