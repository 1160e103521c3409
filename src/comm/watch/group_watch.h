#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"
#include "watch/world_watch.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A collective that has begun, and where the flight record has it.
struct BegunCall {
  std::uint64_t order = 0;   ///< number of the call among all calls of this rank, from 1
  std::uint64_t number = 0;  ///< number of the call within its group; 0 is the set-up
};

/// Records in the flight record whether a thread or the device waits for the end of a call from now
/// on. Thread safe.
void set_waits(flight::Record& record, const BegunCall& call, bool waits);

/// Records the calls of one group in this rank's flight record. One thread at a time.
class GroupWatch {
 public:
  GroupWatch(WorldWatchPtr world, const std::string& name, const std::vector<int>& ranks);

  /// Records the beginning of the group's next collective, in which this thread waits.
  BegunCall begin(const char* collective, std::string_view purpose = {});
  /// Records that this thread waits from now on until `call` is done.
  void waits(const BegunCall& call) { set_waits(world_->own(), call, true); }
  /// Records that the call is done or has failed, or that this thread no longer waits for the call.
  void leaves(const BegunCall& call) { set_waits(world_->own(), call, false); }
  /// Passes a call to the watchdog, if wait() has returned before the device has finished the call:
  /// see Watchdog::await().
  void await_device(std::function<bool()> is_done, const BegunCall& call);

  /// The number of the last call that has begun.
  std::uint64_t number() const { return begun_ - 1; }
  /// The ranks that will not complete the call `number` of this group, as far as known: see
  /// WorldWatch::not_in().
  std::vector<int> not_in(std::uint64_t number) const { return world_->not_in(*group_, number); }
  WorldWatch& world() const { return *world_; }
  const std::shared_ptr<const WatchedGroup>& group() const { return group_; }

 private:
  WorldWatchPtr world_;
  std::shared_ptr<const WatchedGroup> group_;
  /// The group's slot in the flight record; nullptr if the record is full.
  flight::GroupSlot* slot_;
  /// The number of calls that have begun. The number is atomic, because threads that finish earlier
  /// calls read it.
  std::atomic<std::uint64_t> begun_ = 0;
};

}  // namespace tessera::comm
TESSERA_API_END
