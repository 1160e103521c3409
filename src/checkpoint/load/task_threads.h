#pragma once

#include <functional>
#include <vector>

namespace tessera::checkpoint {

/// Runs each task once, in their order but for that several run at a time: on this thread and up to
/// `threads` - 1 others, to which this one's thread-local state (gradient mode, scopes) goes along;
/// the progress that they note counts as this one's. Returns when all have ended. Throws what the
/// first one that failed has thrown; then those that had not begun are left out.
void run_on_threads(int threads, const std::vector<std::function<void()>>& tasks);

}  // namespace tessera::checkpoint
