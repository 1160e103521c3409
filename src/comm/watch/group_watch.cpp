// Lists the communicating threads of a process in the flight records of its ranks, because a thread
// that has ended can no longer help a waiting rank.

#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "group_info.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/comm/trace.h"
#include "watch/group_watch.h"
#include "watch/watchdog.h"

namespace tessera::comm {
namespace {

flight::ThreadSlot* find_thread_slot(flight::Record& record, std::int64_t id) {
  auto* const found = std::ranges::find_if(record.threads, [id](const flight::ThreadSlot& slot) {
    return slot.id.load(std::memory_order_relaxed) == id;
  });
  return found == record.threads.end() ? nullptr : found;
}

/// The thread's slot; if it has none, the slot that stands for all threads without their own slot.
flight::ThreadSlot* find_slot_of(flight::Record& record, std::int64_t id) {
  flight::ThreadSlot* own = find_thread_slot(record, id);
  return own != nullptr ? own : find_thread_slot(record, flight::kSeveralThreads);
}

/// Takes a free slot. If there is none, the last slot permanently stands for all further threads.
flight::ThreadSlot& take_thread_slot(flight::Record& record, std::int64_t id) {
  for (flight::ThreadSlot& slot : record.threads) {
    std::int64_t free = 0;
    if (slot.id.compare_exchange_strong(free, id)) {
      return slot;
    }
  }
  record.threads.back().id.store(flight::kSeveralThreads);
  return record.threads.back();
}

void leave(flight::Record& record, std::int64_t id) {
  flight::ThreadSlot* slot = find_thread_slot(record, id);
  if (slot == nullptr) {
    return;
  }
  slot->worked.store(0);
  slot->id.store(0);
  std::int64_t last = id;
  record.thread.compare_exchange_strong(last, record.threads.front().id.load());
}

}  // namespace

/// Lists a thread in the flight records of the worlds in which it communicates.
class ListedThread {
 public:
  ListedThread() = default;
  ListedThread(const ListedThread&) = delete;
  ListedThread& operator=(const ListedThread&) = delete;
  ~ListedThread() {
    for (const auto& each : worlds_) {
      if (const WorldWatchPtr world = each.lock()) {
        leave(world->own(), id_);
      }
    }
  }

  std::int64_t id() const { return id_; }

  flight::ThreadSlot& slot_in(const WorldWatchPtr& world) {
    if (flight::ThreadSlot* slot = find_thread_slot(world->own(), id_)) {
      return *slot;
    }
    // Duplicates are removed, because a thread without its own slot calls this at each collective.
    std::erase_if(worlds_,
                  [&](const auto& each) { return each.expired() || each.lock() == world; });
    worlds_.push_back(world);
    return take_thread_slot(world->own(), id_);
  }

  void note(flight::Work work) const {
    for (const auto& each : worlds_) {
      const WorldWatchPtr world = each.lock();
      flight::ThreadSlot* slot = world == nullptr ? nullptr : find_slot_of(world->own(), id_);
      if (slot != nullptr) {
        slot->work.store(work, std::memory_order_relaxed);
        slot->worked.store(flight::now(), std::memory_order_release);
      }
    }
  }

 private:
  const std::int64_t id_ = syscall(SYS_gettid);
  std::vector<std::weak_ptr<WorldWatch>> worlds_;
};

namespace {

ListedThread& this_thread() {
  thread_local ListedThread thread;
  return thread;
}

thread_local const ListedThread* works_for = nullptr;

}  // namespace

std::int64_t list_this_thread(const WorldWatchPtr& world) {
  flight::ThreadSlot& slot = this_thread().slot_in(world);
  // In a slot that several threads share, a call of one thread does not show what the other threads
  // do.
  const bool is_own = slot.id.load(std::memory_order_relaxed) != flight::kSeveralThreads;
  if (is_own && slot.worked.load(std::memory_order_relaxed) != 0) {
    slot.worked.store(0, std::memory_order_relaxed);
  }
  const std::int64_t id = this_thread().id();
  if (world->own().thread.load(std::memory_order_relaxed) != id) {
    world->own().thread.store(id, std::memory_order_relaxed);
  }
  return id;
}

void note_progress(flight::Work work) {
  listed_thread().note(work);
}

const ListedThread& listed_thread() {
  return works_for == nullptr ? this_thread() : *works_for;
}

WorkFor::WorkFor(const ListedThread& thread) : before_(std::exchange(works_for, &thread)) {}

WorkFor::~WorkFor() {
  works_for = before_;
}

namespace {

using flight::CallState;

/// The text of as many of the first ranks as fit into `most` characters.
std::string ranks_that_fit(std::vector<int> ranks, std::size_t most) {
  std::string text = flight::ranks_text(ranks);
  while (text.size() > most) {
    ranks.resize(ranks.size() / 2);
    text = flight::ranks_text(ranks);
  }
  return text;
}

/// Takes a slot under a lock, so that threads that make groups at the same time get one slot each.
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

/// Records that this thread makes calls of the group. Returns the kernel's number of the thread.
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
      // At least 1, because 0 marks a free slot.
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
  // An exchange, so that none of the following writes is visible before it.
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
