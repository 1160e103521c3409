#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

namespace tessera::comm {

/// The operator of c10d for `op`. NCCL implements all operators, Gloo all except the average.
TESSERA_API detail::GroupReduceOp to_c10d(ReduceOp op);

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

}  // namespace tessera::comm
