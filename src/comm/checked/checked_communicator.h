// The layer between the groups of a world and their back ends. A custom communicator that a program
// passes to a mesh is not wrapped, because the communicator usually uses groups that are already
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

/// A second group of the ranks of a group, for data on the hosts. The second group is made at its
/// first use, because most groups never need a second group.
class LazyHostGroup {
 public:
  using Make = std::function<CommunicatorPtr()>;

  /// `make` makes the second group. It is collective.
  explicit LazyHostGroup(Make make) : make_(std::move(make)) {}

  /// The second group. Collective at the first call. Throws what `make` throws.
  Communicator& get();
  /// Makes ranks that wait in the second group fail. Thread safe.
  void abort();

 private:
  Make make_;
  // Protects `made_` in get() against an abort() from another thread.
  std::mutex mutex_;
  CommunicatorPtr made_;
  std::atomic<bool> failed_{false};
};

/// Makes the wrapper of a communicator that a World makes. The wrapper checks the arguments of each
/// call, so that an invalid call throws before any byte is moved; counts the call in `traffic`,
/// unless the group has one rank; and forwards the call to `inner`. `hosts`: the group over which
/// agree_on_calls() compares the calls with a purpose; nullptr if `inner` compares each call
/// itself. Every message contains the name of the group and its world ranks.
CommunicatorPtr make_checked_communicator(CommunicatorPtr inner, GroupInfo group,
                                          TrafficCounterPtr traffic,
                                          std::unique_ptr<LazyHostGroup> hosts = nullptr);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
