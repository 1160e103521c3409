// From a thread to its rank. A node of autograd's graph knows the thread that made it: that leads
// from autograd's threads back to the rank's own, with nothing to install in either.

#include "rank/rank_state.h"

#include <ATen/record_function.h>

#include <optional>
#include <unordered_map>
#include <utility>

#include "rank/rank_thread.h"
#include "tessera/core/detail/environment_switch.h"
#include "tessera/dtensor/detail/end_of_backward.h"
#include "tessera/internals/detail/backward.h"

namespace tessera::detail {
namespace {

struct Ranks {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, std::shared_ptr<RankState>> by_thread;
};

/// Never destroyed: threads may end while the process does.
Ranks& ranks() {
  static auto& all = *new Ranks;
  return all;
}

class CallbackScope {
 public:
  explicit CallbackScope(std::shared_ptr<RankState> rank)
      : outer_(std::exchange(RankThread::here().rank_of_callback, std::move(rank))) {}
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;
  ~CallbackScope() { RankThread::here().rank_of_callback = std::move(outer_); }

 private:
  std::shared_ptr<RankState> outer_;
};

bool strict_everywhere() {
  static const bool everywhere = environment_switch("TESSERA_STRICT").value_or(false);
  return everywhere;
}

}  // namespace

RankState::RankState() : strict(strict_everywhere()) {}

RankThread::RankThread()
    : thread(at::RecordFunction::currentThreadId()),
      rank(std::make_shared<RankState>()),
      checks_calls(debug_checks()) {
  const std::lock_guard lock(ranks().mutex);
  ranks().by_thread[thread] = rank;
}

RankThread::~RankThread() {
  const std::lock_guard lock(ranks().mutex);
  ranks().by_thread.erase(thread);
}

RankThread& RankThread::here() {
  thread_local RankThread state;
  return state;
}

std::shared_ptr<RankState> RankState::here() {
  const RankThread& own = RankThread::here();
  if (own.rank_of_callback != nullptr) {
    return own.rank_of_callback;
  }
  const std::optional<std::uint64_t> thread = origin_of_running_node();
  if (!thread || *thread == own.thread) {
    return own.rank;
  }
  const std::lock_guard lock(ranks().mutex);
  // The thread of the forward may have ended.
  const auto found = ranks().by_thread.find(*thread);
  return found == ranks().by_thread.end() ? own.rank : found->second;
}

void call_at_end_of_backward(std::function<void()> callback) {
  queue_end_of_backward([rank = RankState::here(), callback = std::move(callback)] {
    const CallbackScope scope(rank);
    callback();
  });
}

}  // namespace tessera::detail
