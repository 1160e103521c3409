#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Shows this thread's warnings as those of the rank's main thread: in one line, once a job.
/// libtorch's warning handler is per thread, so each thread of the library that may warn calls this
/// first. Does nothing where the process has not called world_from_environment(), or the thread has
/// its own handler.
void take_warnings_of_thread();

}  // namespace tessera::comm
TESSERA_API_END
