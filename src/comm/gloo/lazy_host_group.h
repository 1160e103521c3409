// The group in which ranks compare their calls and exchange flags where the back end of their
// collectives does not (NCCL, Gloo, and what is staged over Gloo).

#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>

#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// A second group of the same ranks, between their hosts, made at the first use: most groups never
/// need theirs.
class LazyHostGroup {
 public:
  using Make = std::function<CommunicatorPtr()>;

  /// `make` is collective.
  explicit LazyHostGroup(Make make) : make_(std::move(make)) {}

  /// The group. Collective at the first call. Throws what `make` throws.
  Communicator& get();
  /// Makes peers that wait in the group fail. Thread safe.
  void abort();

 private:
  Make make_;
  // Guards `made_` between get() and an abort() from another thread.
  std::mutex mutex_;
  CommunicatorPtr made_;
  std::atomic<bool> failed_{false};
};

}  // namespace tessera::comm
