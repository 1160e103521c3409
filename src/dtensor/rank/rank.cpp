#include <ATen/record_function.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>

#include "rank/rank.h"
#include "tessera/core/detail/environment.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/dispatch_keys.h"

namespace tessera::detail {

// Finds the rank for which a thread works. libtorch stores the creating thread's id in each
// autograd node, so an autograd thread finds its rank by the running node.

namespace {

struct Ranks {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, std::shared_ptr<RankState>> by_thread;
};

/// Never destroyed, because threads can end while the process ends.
Ranks& ranks() {
  static auto& all = *new Ranks;
  return all;
}

class CallbackScope : NoCopy {
 public:
  explicit CallbackScope(std::shared_ptr<RankState> rank)
      : outer_(std::exchange(RankThread::here().rank_of_callback, std::move(rank))) {}
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
  // If the thread that ran the forward has ended, returns the rank of the current thread.
  const auto found = ranks().by_thread.find(*thread);
  return found == ranks().by_thread.end() ? own.rank : found->second;
}

void call_at_end_of_backward(std::function<void()> callback) {
  queue_end_of_backward([rank = RankState::here(), callback = std::move(callback)] {
    const CallbackScope scope(rank);
    callback();
  });
}

// Asynchronous redistributions (RedistributeOptions::async). Process groups whose wait() blocks
// need the TransferQueue: ranks that wait in different orders would deadlock. With NCCL, the queue
// is empty.

std::uint64_t TransferQueue::next_number() {
  const std::lock_guard lock(mutex_);
  return started_++;
}

void TransferQueue::add(std::uint64_t number, const comm::Communicator* group,
                        const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({number, group, transfer});
}

/// Removes and returns the oldest transfer whose sequence number is below `number`. Skips transfers
/// that were destroyed. Returns nullptr if no such transfer exists.
std::shared_ptr<Transfer> TransferQueue::take_before(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Transfer> transfer;
  while (transfer == nullptr && !entries_.empty() && entries_.front().number < number) {
    transfer = entries_.front().transfer.lock();
    entries_.pop_front();
  }
  return transfer;
}

void TransferQueue::finish_before(std::uint64_t number) {
  // The transfer must leave the queue before finish(), because finish() itself calls
  // finish_before() for older transfers.
  while (const auto transfer = take_before(number)) {
    try {
      transfer->finish();
    } catch (...) {
    }
  }
}

std::uint64_t TransferQueue::end_of(const comm::Communicator& group) {
  const std::lock_guard lock(mutex_);
  const auto last = std::find_if(entries_.rbegin(), entries_.rend(),
                                 [&](const auto& entry) { return entry.group == &group; });
  return last == entries_.rend() ? 0 : last->number + 1;
}

at::Tensor finish(const Started& started) {
  if (started.work != nullptr) {
    started.work->wait();
  }
  BelowAutograd guard;
  return started.rest();
}

void finish_transfers() {
  RankState::here()->transfers.finish_before(std::numeric_limits<std::uint64_t>::max());
}

void finish_transfers_on(const comm::Communicator& group) {
  const auto rank = RankState::here();
  // Transfers finish in order, so this also finishes earlier transfers on other process groups.
  rank->transfers.finish_before(rank->transfers.end_of(group));
}

std::shared_ptr<Transfer> Transfer::start(Started started, const comm::Communicator* group) {
  auto transfer = std::make_shared<Transfer>(std::move(started), group != nullptr);
  if (group != nullptr) {
    transfer->rank_->transfers.add(transfer->number_, group, transfer);
  }
  return transfer;
}

Transfer::Transfer(Started started, bool in_order)
    : rank_(RankState::here()),
      started_(std::move(started)),
      in_order_(in_order),
      number_(rank_->transfers.next_number()) {}

Transfer::~Transfer() {
  try {
    finish();
  } catch (...) {
  }
}

const at::Tensor& Transfer::finish() {
  // A second thread that calls finish() waits here. complete() finishes older transfers while
  // `mutex_` is locked. All threads lock newer transfers before older transfers, so no deadlock is
  // possible.
  const std::lock_guard lock(mutex_);
  if (started_.rest != nullptr) {
    complete();
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
  return result_;
}

void Transfer::complete() {
  // Clears `started_` before the wait, so that a failed transfer also counts as finished.
  const auto started = std::exchange(started_, {});
  if (in_order_) {
    rank_->transfers.finish_before(number_);
  }
  try {
    result_ = detail::finish(started);
  } catch (...) {
    error_ = std::current_exception();
  }
}

}  // namespace tessera::detail

namespace tessera {

comm::Communicator& flush_pending_transfers(comm::Communicator& group) {
  detail::finish_transfers();
  return group;
}

bool is_strict() {
  const bool* scope = detail::CarriedScope<detail::Carried::kStrict, bool>::active();
  return scope != nullptr ? *scope : detail::RankState::here()->strict.load();
}

// The flag `replicates` belongs to a thread, because ranks may be threads of one process.
ReplicationScope::ReplicationScope(bool replicate)
    : outer_(std::exchange(detail::RankThread::here().replicates, replicate)) {}
ReplicationScope::~ReplicationScope() {
  detail::RankThread::here().replicates = outer_;
}

// In a backward, plain tensors of libtorch's gradient formulas are equal on all ranks; plain
// tensors of the program's hooks and functions may differ between ranks.
bool plain_tensors_are_replicated() {
  return detail::RankThread::here().replicates ||
         detail::backward_code() == detail::BackwardCode::kFormula;
}

std::int64_t implicit_redistributions() {
  return detail::RankState::here()->implicit_redistributions;
}

// OperatorModeScope and MetaDevice include kDistributedKey on a thread, so that operators on plain
// tensors reach the fallback. Other plain calls have no overhead.

OperatorModeScope::OperatorModeScope(OperatorMode& mode)
    : scope_(&mode), guard_(detail::kDistributedKey) {}

// While an OperatorModePause exists, no OperatorMode is active, and plain calls run as usual.
OperatorModePause::OperatorModePause() : scope_(nullptr) {}

OperatorMode* active_operator_mode() {
  // This function runs at each dispatch. Testing the included keys is cheap; searching the
  // OperatorMode in libtorch's thread-local debug info is slower.
  if (!detail::is_included(detail::kDistributedKey)) {
    return nullptr;
  }
  OperatorMode* const* mode =
      detail::CarriedScope<detail::Carried::kOperatorMode, OperatorMode*>::active();
  return mode != nullptr ? *mode : nullptr;
}

namespace detail {

// The flag makes_meta belongs to a thread and not to the rank, because modules are never made on
// the threads that run backward.
MetaFactoryGuard::MetaFactoryGuard()
    : outer_(std::exchange(RankThread::here().makes_meta, true)), guard_(kDistributedKey) {}
MetaFactoryGuard::~MetaFactoryGuard() {
  RankThread::here().makes_meta = outer_;
}

bool makes_meta_tensors() {
  return RankThread::here().makes_meta;
}

}  // namespace detail

}  // namespace tessera
