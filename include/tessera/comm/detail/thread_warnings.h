#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Has the warnings of this thread shown as those of the rank's main thread are: in one line, once
/// a job. libtorch's handler of warnings is of one thread, so each thread of the library that may
/// warn begins with this. Does nothing where the process has not called world_from_environment(),
/// or the thread has a handler of its own.
void take_warnings_of_thread();

}  // namespace tessera::comm
TESSERA_API_END
