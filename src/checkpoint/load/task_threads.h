#pragma once

#include <functional>
#include <vector>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Runs each task once, in their order but for that several run at a time: on this thread and up to
/// `threads` - 1 others, to which this one's thread-local state (gradient mode, scopes) goes along;
/// the progress that they note counts as this one's. Returns when all have ended. Throws what the
/// first one that failed has thrown; then those that had not begun are left out.
void run_on_threads(int threads, const std::vector<std::function<void()>>& tasks);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
