#pragma once

#include <functional>
#include <vector>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Runs each task once, started in their order, several at a time: on this thread and up to
/// `threads` - 1 others. These get this thread's thread-local state (gradient mode, scopes), and
/// the progress that they note counts as this thread's. Returns when all have ended. Throws the
/// error of the first task that failed; tasks that had not begun are then skipped.
void run_on_threads(int threads, const std::vector<std::function<void()>>& tasks);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
