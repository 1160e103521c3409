#include "watch/thread_activity.h"

#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>

#include "host/host.h"

namespace tessera::comm {
namespace {

using flight::Activity;

constexpr std::chrono::milliseconds kBetweenLooks{250};
/// A thread that computed for more than this part of the time is not asleep.
constexpr double kBusy = 0.1;

double busy_part(std::uint64_t ticks) {
  const double seconds = static_cast<double>(ticks) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return seconds / std::chrono::duration<double>(kBetweenLooks).count();
}

std::optional<ThreadStatus> look_at(const WatchedThread& thread) {
  if (!is_alive({thread.pid, thread.start_time})) {
    return std::nullopt;
  }
  const auto status = thread_status(thread.pid, thread.thread == 0 ? thread.pid : thread.thread);
  // The thread that communicated last may be gone while the process runs on.
  return status ? status : thread_status(thread.pid, thread.pid);
}

Activity compare(const std::optional<ThreadStatus>& before,
                 const std::optional<ThreadStatus>& after) {
  if (!after) {
    return Activity::kGone;
  }
  if (after->state == 'T' || after->state == 't') {
    return Activity::kStopped;
  }
  const std::uint64_t ticks = before ? after->cpu_ticks - before->cpu_ticks : 0;
  return after->state == 'R' || busy_part(ticks) > kBusy ? Activity::kRuns : Activity::kSleeps;
}

}  // namespace

std::vector<Activity> observe_threads(const std::vector<WatchedThread>& threads) {
  std::vector<std::optional<ThreadStatus>> before;
  for (const WatchedThread& thread : threads) {
    before.push_back(look_at(thread));
  }
  std::this_thread::sleep_for(kBetweenLooks);
  std::vector<Activity> result;
  for (std::size_t i = 0; i < threads.size(); ++i) {
    result.push_back(compare(before[i], look_at(threads[i])));
  }
  return result;
}

}  // namespace tessera::comm
