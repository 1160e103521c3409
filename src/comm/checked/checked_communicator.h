// A wrapper around the process groups that a World makes. Communicators of the program are not
// wrapped: such a Communicator usually calls process groups of a World, which are wrapped already.

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
/// group at its first use, because most programs never need a CPU process group.
class LazyHostGroup {
 public:
  using Make = std::function<CommunicatorPtr()>;

  /// `make` returns the process group and is collective.
  explicit LazyHostGroup(Make make) : make_(std::move(make)) {}

  /// The first call makes the process group and is collective. Throws the exceptions of `make`.
  Communicator& get();
  /// Aborts the process group, so that ranks that wait in the group throw. Thread safe.
  void abort();

 private:
  Make make_;
  // Locked while abort() and get() use `made_`.
  std::mutex mutex_;
  CommunicatorPtr made_;
  std::atomic<bool> failed_{false};
};

/// Wraps `inner`, the communicator of a back end. The wrapper checks the arguments of each call, so
/// that an invalid call throws before any byte is moved; counts the call in `traffic`, unless the
/// group has one rank; and forwards the call to `inner`. `hosts`: the CPU group over which
/// agree_on_calls() compares the calls with a purpose; nullptr if `inner` compares each call
/// itself. Every message names the group and its world ranks.
CommunicatorPtr make_checked_communicator(CommunicatorPtr inner, GroupInfo group,
                                          TrafficCounterPtr traffic,
                                          std::unique_ptr<LazyHostGroup> hosts = nullptr);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
