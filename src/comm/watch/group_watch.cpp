#include "watch/group_watch.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "group_info.h"
#include "tessera/comm/trace.h"
#include "watch/watchdog.h"

namespace tessera::comm {
namespace {

/// Takes a free slot of the flight record for a group. A lock ensures that threads that make groups
/// at the same time get different slots.
flight::GroupSlot* take_slot(flight::Record& record, const WatchedGroup& group,
                             const std::string& name) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto* const slot = std::ranges::find_if(
      record.groups, [](const flight::GroupSlot& each) { return each.id.load() == 0; });
  if (slot == record.groups.end()) {
    return nullptr;
  }
  slot->name = flight::padded<sizeof slot->name>(name);
  for (const int rank : group.ranks) {
    const auto bit = static_cast<std::size_t>(rank);
    if (bit < flight::kMostRanks) {
      slot->ranks[bit / 64] |= std::uint64_t{1} << (bit % 64);
    }
  }
  slot->id.store(group.id, std::memory_order_release);
  return slot;
}

}  // namespace

void set_waits(flight::Record& record, const BegunCall& call, bool waits) {
  flight::CallSlot& slot = record.calls[call.order % flight::kCalls];
  if (slot.order.load(std::memory_order_relaxed) == call.order) {
    slot.since.store(unix_time(), std::memory_order_relaxed);
    slot.waits.store(waits, std::memory_order_release);
  }
}

GroupWatch::GroupWatch(WorldWatchPtr world, const std::string& name, const std::vector<int>& ranks)
    : world_(std::move(world)),
      // The number of the group is at least 1, because 0 marks a free slot.
      group_(std::make_shared<const WatchedGroup>(
          WatchedGroup{std::max<std::uint64_t>(hash_of(name + " of " + join(ranks)), 1), ranks})),
      slot_(take_slot(world_->own(), *group_, name)) {}

BegunCall GroupWatch::begin(const char* collective, std::string_view purpose) {
  flight::Record& record = world_->own();
  const BegunCall call{record.calls_begun.fetch_add(1) + 1, begun_++};
  flight::CallSlot& slot = record.calls[call.order % flight::kCalls];
  // `order` is set by an exchange, so that no following write becomes visible before it.
  slot.order.exchange(0, std::memory_order_acq_rel);
  slot.label.store(
      {.group = group_->id,
       .number = call.number,
       .collective = flight::padded<sizeof(flight::CallLabel::collective)>(collective),
       .purpose = flight::padded<sizeof(flight::CallLabel::purpose)>(purpose),
       .caller = flight::padded<sizeof(flight::CallLabel::caller)>(CallerScope::outermost())});
  slot.since.store(unix_time(), std::memory_order_relaxed);
  slot.waits.store(true, std::memory_order_relaxed);
  slot.order.store(call.order, std::memory_order_release);
  if (slot_ != nullptr) {
    slot_->begun.store(begun_, std::memory_order_release);
  }
  return call;
}

void GroupWatch::await_device(std::function<bool()> is_done, const BegunCall& call) {
  // The world owns the watchdog, so the pointer stays valid.
  auto ends_call = [is_done = std::move(is_done), call, world = world_.get()] {
    const bool done = is_done();
    if (done) {
      set_waits(world->own(), call, false);
    }
    return done;
  };
  world_->watchdog().await(std::move(ends_call), call, group_);
}

}  // namespace tessera::comm
