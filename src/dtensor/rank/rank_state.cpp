// From a thread to its rank. A node of autograd's graph knows the thread that made it: that leads
// from autograd's threads back to the rank's own, with nothing to install in either.

#include "rank/rank_state.h"

#include <ATen/record_function.h>

#include <optional>
#include <unordered_map>
#include <utility>

#include "tessera/core/detail/environment_switch.h"
#include "tessera/dtensor/detail/end_of_backward.h"
#include "tessera/internals/detail/running_backward.h"

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

/// This thread's own state, listed for as long as the thread lives.
class OwnState {
 public:
  OwnState() {
    const std::lock_guard lock(ranks().mutex);
    ranks().by_thread[thread_] = state_;
  }
  OwnState(const OwnState&) = delete;
  OwnState& operator=(const OwnState&) = delete;
  ~OwnState() {
    const std::lock_guard lock(ranks().mutex);
    ranks().by_thread.erase(thread_);
  }

  const std::shared_ptr<RankState>& state() const { return state_; }
  std::uint64_t thread() const { return thread_; }

 private:
  std::uint64_t thread_ = at::RecordFunction::currentThreadId();
  std::shared_ptr<RankState> state_ = std::make_shared<RankState>();
};

/// That of the callback at the end of a backward that this thread is in, where there is no node.
thread_local std::shared_ptr<RankState> rank_of_callback;

class CallbackScope {
 public:
  explicit CallbackScope(std::shared_ptr<RankState> rank)
      : outer_(std::exchange(rank_of_callback, std::move(rank))) {}
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;
  ~CallbackScope() { rank_of_callback = std::move(outer_); }

 private:
  std::shared_ptr<RankState> outer_;
};

bool strict_everywhere() {
  static const bool everywhere = environment_switch("TESSERA_STRICT").value_or(false);
  return everywhere;
}

}  // namespace

RankState::RankState() : strict(strict_everywhere()) {}

std::shared_ptr<RankState> RankState::here() {
  thread_local const OwnState own;
  if (rank_of_callback != nullptr) {
    return rank_of_callback;
  }
  const std::optional<std::uint64_t> thread = origin_of_running_node();
  if (!thread || *thread == own.thread()) {
    return own.state();
  }
  const std::lock_guard lock(ranks().mutex);
  // The thread of the forward may have ended.
  const auto found = ranks().by_thread.find(*thread);
  return found == ranks().by_thread.end() ? own.state() : found->second;
}

void call_at_end_of_backward(std::function<void()> callback) {
  queue_end_of_backward([rank = RankState::here(), callback = std::move(callback)] {
    const CallbackScope scope(rank);
    callback();
  });
}

}  // namespace tessera::detail
