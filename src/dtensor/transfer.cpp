#include "transfer.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <utility>

#include "below_autograd.h"
#include "tessera/dtensor/in_order.h"

namespace tessera::detail {
namespace {

/// What this thread has started and not finished, oldest first.
struct Queue {
  struct Entry {
    std::uint64_t number;
    const comm::Communicator* group;
    std::weak_ptr<Transfer> transfer;
  };
  std::deque<Entry> entries;
  std::uint64_t started = 0;
};

Queue& queue() {
  thread_local Queue queue;
  return queue;
}

/// Failures are kept by the transfers, for those who use their results.
void finish_before(std::uint64_t number) {
  auto& entries = queue().entries;
  while (!entries.empty() && entries.front().number < number) {
    const auto transfer = entries.front().transfer.lock();
    entries.pop_front();
    if (transfer == nullptr) continue;
    try {
      transfer->finish();
    } catch (...) {
    }
  }
}

}  // namespace

at::Tensor finish(const Started& started) {
  if (started.work != nullptr) started.work->wait();
  BelowAutograd guard;
  return started.rest();
}

void finish_transfers() {
  finish_before(std::numeric_limits<std::uint64_t>::max());
}

void finish_transfers_on(const comm::Communicator& group) {
  const auto& entries = queue().entries;
  const auto last = std::find_if(entries.rbegin(), entries.rend(),
                                 [&](const auto& entry) { return entry.group == &group; });
  if (last != entries.rend()) finish_before(last->number + 1);
}

std::shared_ptr<Transfer> Transfer::start(Started started, const comm::Communicator* group) {
  auto transfer = std::make_shared<Transfer>(std::move(started), group != nullptr);
  if (group != nullptr) queue().entries.push_back({transfer->number_, group, transfer});
  return transfer;
}

Transfer::Transfer(Started started, bool in_order)
    : started_(std::move(started)), in_order_(in_order), number_(queue().started++) {}

Transfer::~Transfer() {
  try {
    finish();
  } catch (...) {
  }
}

const at::Tensor& Transfer::finish() {
  const std::lock_guard lock(mutex_);
  if (started_.work != nullptr) complete();
  if (error_) std::rethrow_exception(error_);
  return result_;
}

void Transfer::complete() {
  const auto started = std::exchange(started_, {});
  if (in_order_) finish_before(number_);
  try {
    result_ = detail::finish(started);
  } catch (...) {
    error_ = std::current_exception();
  }
}

}  // namespace tessera::detail

namespace tessera {

comm::Communicator& in_order(comm::Communicator& group) {
  detail::finish_transfers();
  return group;
}

}  // namespace tessera
