// The threads of a process that communicate, as the flight records of its ranks list them: a thread
// that has ended can no longer help one that waits.

#include "watch/thread_list.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/comm/detail/work_progress.h"

namespace tessera::comm {
namespace {

flight::ThreadSlot* find_thread_slot(flight::Record& record, std::int64_t id) {
  auto* const found = std::ranges::find_if(record.threads, [id](const flight::ThreadSlot& slot) {
    return slot.id.load(std::memory_order_relaxed) == id;
  });
  return found == record.threads.end() ? nullptr : found;
}

/// The thread's slot, or that of all threads without one.
flight::ThreadSlot* find_slot_of(flight::Record& record, std::int64_t id) {
  flight::ThreadSlot* own = find_thread_slot(record, id);
  return own != nullptr ? own : find_thread_slot(record, flight::kSeveralThreads);
}

/// Without a free slot the last one stands for all threads to come, for good.
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

/// In the records of the worlds that it communicates in.
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
    // A thread without its own slot comes here at each of its calls.
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
  // A call of one of several threads does not show what the others do.
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

}  // namespace tessera::comm
