// A wrapper around the process groups that a World makes. A program's own Communicator is not
// wrapped.

#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

using TrafficCounterPtr = std::shared_ptr<TrafficCounter>;

/// A CPU process group with the ranks of another process group. LazyHostGroup makes the CPU process
/// group at its first use: most programs never use a CPU process group.
class LazyHostGroup {
 public:
  using Make = std::function<CommunicatorPtr()>;

  /// `make` makes the CPU process group; `make` is collective.
  explicit LazyHostGroup(Make make) : make_(std::move(make)) {}

  /// The first call makes the process group, is collective, and throws the exceptions of `make`.
  Communicator& get();
  /// Aborts the process group, so that ranks that wait in the group throw. Thread safe.
  void abort();

 private:
  Make make_;
  std::mutex mutex_;
  CommunicatorPtr made_;
  std::atomic<bool> failed_{false};
};

/// Wraps `inner`, the communicator of a back end. Adds checks of arguments, counts in `traffic`,
/// and messages with world ranks. `hosts`: the CPU group for agree_on_calls(); nullptr if `inner`
/// compares each call itself.
CommunicatorPtr make_checked_communicator(CommunicatorPtr inner, GroupInfo group,
                                          TrafficCounterPtr traffic,
                                          std::unique_ptr<LazyHostGroup> hosts = nullptr);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
