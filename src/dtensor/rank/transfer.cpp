// Pending redistributions (RedistributeOptions::async). The queue is for process groups whose
// wait() blocks the thread: two ranks that wait for the same collectives in different orders would
// deadlock. With NCCL a wait is a stream event, and no transfer enters the queue.

#include "rank/transfer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "rank/rank.h"
#include "tessera/dtensor/detail/transfers.h"

namespace tessera::detail {

std::uint64_t TransferQueue::next_number() {
  const std::lock_guard lock(mutex_);
  return started_++;
}

void TransferQueue::add(std::uint64_t number, const comm::Communicator* group,
                        const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({number, group, transfer});
}

/// The oldest transfer with a lower number than `number` whose result is still referenced, or
/// nullptr. Removes the transfer from the queue.
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
  // The transfer leaves the queue before it is finished, because finish() calls this function for
  // older transfers.
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
  // The queue is only emptied from its front, so all earlier transfers are waited for as well.
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
  // A second caller waits here and then finds the result. The lock is kept while older transfers
  // are finished: locks are taken from younger to older transfers, so there is no cycle.
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
  // `started_` is emptied at once, because the transfer counts as finished even if this function
  // throws.
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

}  // namespace tessera
