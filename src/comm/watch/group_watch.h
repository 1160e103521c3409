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
  std::uint64_t order = 0;   ///< its number among all calls of this rank, from 1
  std::uint64_t number = 0;  ///< its number among the group's calls; 0 is the set-up
};

/// Records that a call is done or has failed. Thread safe.
void mark_ended(flight::Record& record, const BegunCall& call, flight::CallState state);
/// Restarts the time of a wait. Thread safe.
void restart_wait(flight::Record& record, const BegunCall& call);

/// Records the calls of one group in this rank's flight record. One thread at a time.
class GroupWatch {
 public:
  GroupWatch(WorldWatchPtr world, const std::string& name, const std::vector<int>& ranks);

  /// Records the beginning of the group's next collective.
  BegunCall begin(const char* collective, std::string_view purpose, std::int64_t bytes);
  /// Records that the call has returned before it is done.
  void returned(const BegunCall& call);
  /// Records that this thread waits from now on until `call` is done.
  void waits(const BegunCall& call);
  void done(const BegunCall& call);
  void failed(const BegunCall& call);

  /// The number of the last call that has begun.
  std::uint64_t number() const { return begun_ - 1; }
  /// The ranks on this host that have not begun the last call, or have begun a different call
  /// instead.
  std::vector<int> missing() const;
  /// The ranks that have not begun the call with this number, or have ended.
  std::vector<int> not_in(std::uint64_t number) const;
  /// The time of the last progress of these ranks with files; 0 if there was none.
  std::int64_t last_work(const std::vector<int>& ranks) const;
  std::uint64_t id() const { return id_; }
  WorldWatch& world() const { return *world_; }

 private:
  WorldWatchPtr world_;
  std::uint64_t id_;
  std::vector<int> ranks_;
  flight::GroupSlot* slot_;  ///< nullptr if the record has no room for more groups
  /// Also read by threads that finish earlier calls.
  std::atomic<std::uint64_t> begun_ = 0;
};

}  // namespace tessera::comm
TESSERA_API_END

namespace tessera::comm {

/// Adds the calling thread to the record of this rank until the thread ends, and clears its
/// progress with files. Returns the kernel's number of the thread.
std::int64_t list_this_thread(const WorldWatchPtr& world);

}  // namespace tessera::comm
