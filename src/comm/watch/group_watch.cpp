#include "watch/group_watch.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "group_info.h"
#include "tessera/comm/trace.h"
#include "watch/thread_list.h"
#include "watch/watchdog.h"

namespace tessera::comm {
namespace {

using flight::CallState;

/// The text of the first ranks of a list, as many as fit.
std::string ranks_that_fit(std::vector<int> ranks, std::size_t most) {
  std::string text = flight::ranks_text(ranks);
  while (text.size() > most) {
    ranks.resize(ranks.size() / 2);
    text = flight::ranks_text(ranks);
  }
  return text;
}

/// Threads that make groups at the same time get a slot each.
flight::GroupSlot* take_slot(flight::Record& record, std::uint64_t id, const std::string& name,
                             const std::vector<int>& ranks) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (flight::GroupSlot& slot : record.groups) {
    if (slot.id.load() == 0) {
      flight::GroupLabel label;
      label.name = flight::padded<sizeof label.name>(name);
      label.ranks = flight::padded<sizeof label.ranks>(ranks_that_fit(ranks, sizeof label.ranks));
      slot.label.store(label);
      slot.id.store(id, std::memory_order_release);
      return &slot;
    }
  }
  return nullptr;
}

/// Notes that this thread makes calls of the group. Returns it.
std::int64_t note_thread(const WorldWatchPtr& world, flight::GroupSlot* group) {
  const std::int64_t thread = list_this_thread(world);
  if (group != nullptr) {
    std::int64_t only = 0;
    if (!group->thread.compare_exchange_strong(only, thread) && only != thread) {
      group->thread.store(flight::kSeveralThreads, std::memory_order_relaxed);
    }
  }
  return thread;
}

flight::CallSlot* slot_of(flight::Record& record, std::uint64_t order) {
  flight::CallSlot& slot = record.calls[order % flight::kCalls];
  return slot.order.load(std::memory_order_relaxed) == order ? &slot : nullptr;
}

}  // namespace

void mark_ended(flight::Record& record, const BegunCall& call, CallState state) {
  if (flight::CallSlot* slot = slot_of(record, call.order)) {
    slot->ended.store(flight::now(), std::memory_order_relaxed);
    slot->state.store(state, std::memory_order_release);
  }
}

void restart_wait(flight::Record& record, const BegunCall& call) {
  if (flight::CallSlot* slot = slot_of(record, call.order)) {
    slot->waits_since.store(flight::now(), std::memory_order_relaxed);
  }
}

GroupWatch::GroupWatch(WorldWatchPtr world, const std::string& name, const std::vector<int>& ranks)
    : world_(std::move(world)),
      // 0 is that of a free slot.
      id_(std::max<std::uint64_t>(hash_of(name + " of " + flight::ranks_text(ranks)), 1)),
      ranks_(ranks),
      slot_(take_slot(world_->own(), id_, name, ranks)) {
  world_->watchdog().start();
}

BegunCall GroupWatch::begin(const char* collective, std::string_view purpose, std::int64_t bytes) {
  flight::Record& record = world_->own();
  const std::int64_t thread = note_thread(world_, slot_);
  const std::int64_t begun = flight::now();
  BegunCall call{record.calls_begun.fetch_add(1) + 1, begun_++};
  flight::CallSlot& slot = record.calls[call.order % flight::kCalls];
  // An exchange, so that nothing of what follows is written before it.
  slot.order.exchange(0, std::memory_order_acq_rel);
  slot.label.store(
      {.group = id_,
       .number = call.number,
       .thread = thread,
       .bytes = bytes,
       .step = record.step.load(std::memory_order_relaxed),
       .begun = begun,
       .collective = flight::padded<sizeof(flight::CallLabel::collective)>(collective),
       .purpose = flight::padded<sizeof(flight::CallLabel::purpose)>(purpose),
       .caller = flight::padded<sizeof(flight::CallLabel::caller)>(CallerScope::outermost())});
  slot.state.store(CallState::kWaiting, std::memory_order_relaxed);
  slot.waits_since.store(begun, std::memory_order_relaxed);
  slot.ended.store(0, std::memory_order_relaxed);
  slot.order.store(call.order, std::memory_order_release);
  if (slot_ != nullptr) {
    slot_->begun.store(begun_, std::memory_order_release);
  }
  return call;
}

void GroupWatch::waits(const BegunCall& call) {
  note_thread(world_, slot_);
  if (flight::CallSlot* slot = slot_of(world_->own(), call.order)) {
    slot->waits_since.store(flight::now(), std::memory_order_relaxed);
    slot->state.store(CallState::kWaiting, std::memory_order_release);
  }
}

void GroupWatch::returned(const BegunCall& call) {
  if (flight::CallSlot* slot = slot_of(world_->own(), call.order)) {
    slot->state.store(CallState::kBegun, std::memory_order_release);
  }
}

void GroupWatch::done(const BegunCall& call) {
  mark_ended(world_->own(), call, CallState::kDone);
}

void GroupWatch::failed(const BegunCall& call) {
  mark_ended(world_->own(), call, CallState::kFailed);
}

std::vector<int> GroupWatch::missing() const {
  const flight::RankReport own = flight::read(world_->own());
  const auto last = std::ranges::find_if(own.calls, [this](const flight::Call& call) {
    return call.group == id_ && call.number == number();
  });
  return last == own.calls.end() ? std::vector<int>()
                                 : flight::missing_ranks(world_->reports(), own, *last);
}

std::int64_t GroupWatch::last_work(const std::vector<int>& ranks) const {
  std::int64_t last = 0;
  for (const flight::RankReport& report : world_->reports()) {
    if (std::ranges::find(ranks, report.rank) != ranks.end()) {
      last = std::max(last, flight::last_work(report, id_));
    }
  }
  return last;
}

std::vector<int> GroupWatch::not_in(std::uint64_t number) const {
  std::vector<int> ranks;
  for (const int rank : ranks_) {
    const auto begun = world_->calls_begun(rank, id_);
    if ((begun && *begun <= number) || !world_->may_come(rank)) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

}  // namespace tessera::comm
