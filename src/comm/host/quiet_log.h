#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// While one exists, libtorch's log lacks what its store and its NCCL groups say in pages beside
/// the error of which we make one of a line: it is held back by source file, and all else is shown.
/// TORCH_CPP_LOG_LEVEL, if it is set, has the last word. Thread safe.
class QuietLog {
 public:
  QuietLog();
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;
  ~QuietLog();
};

}  // namespace tessera::comm
TESSERA_API_END
