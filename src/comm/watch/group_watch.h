#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"
#include "watch/world_watch.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// A collective that has begun.
struct BegunCall {
  std::uint64_t order = 0;   ///< among all calls of this rank, from 1
  std::uint64_t number = 0;  ///< among those of the group; 0 is its set-up
};

/// Notes that a call is done, or has failed. Thread safe.
void mark_ended(flight::Record& record, const BegunCall& call, flight::CallState state);
/// Notes that a call that is waited for has waited from now on. Thread safe.
void restart_wait(flight::Record& record, const BegunCall& call);

/// The calls of one group in this rank's flight record. One thread at a time, as its communicator.
class GroupWatch {
 public:
  GroupWatch(WorldWatchPtr world, const std::string& name, const std::vector<int>& ranks);

  /// Notes that the next collective of this group begins, and that this thread may wait in it.
  BegunCall begin(const char* collective, std::string_view purpose, std::int64_t bytes);
  /// The call has returned before it is done.
  void returned(const BegunCall& call);
  /// This thread waits from now on until that call is done.
  void waits(const BegunCall& call);
  void done(const BegunCall& call);
  void failed(const BegunCall& call);

  /// The number of the last call that was begun.
  std::uint64_t number() const { return begun_ - 1; }
  /// The ranks that have not begun the call that was begun last, or have begun another one instead,
  /// as far as this host's records tell.
  std::vector<int> missing() const;
  /// The ranks that have not begun the call with this number, or have but will begin nothing any
  /// more.
  std::vector<int> not_in(std::uint64_t number) const;
  /// When one of these ranks of this host last made progress with work that its next call waits
  /// for; 0: none has reported such work.
  std::int64_t last_work(const std::vector<int>& ranks) const;
  std::uint64_t id() const { return id_; }
  WorldWatch& world() const { return *world_; }

 private:
  WorldWatchPtr world_;
  std::uint64_t id_;
  std::vector<int> ranks_;
  flight::GroupSlot* slot_;  ///< nullptr: the record has no room for more groups
  /// Read by threads that finish earlier calls.
  std::atomic<std::uint64_t> begun_ = 0;
};

}  // namespace tessera::comm
TESSERA_API_END
