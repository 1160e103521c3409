#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>

#include "group_info.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// A second group of the ranks of a group, between their hosts, made at the first use.
class LazyHostGroup {
 public:
  using Make = std::function<CommunicatorPtr()>;

  /// `store`: of this alone. `make` is collective.
  LazyHostGroup(c10::intrusive_ptr<c10d::Store> store, GroupInfo group, Make make)
      : store_(std::move(store)), group_(std::move(group)), make_(std::move(make)) {}

  /// The first time collective. Throws PeerError if a rank does not come within the time-out, and
  /// soon after one has aborted.
  Communicator& get();
  /// Ends the peers' waiting. From any thread.
  void abort();

 private:
  void await_peers();

  c10::intrusive_ptr<c10d::Store> store_;
  GroupInfo group_;
  Make make_;
  std::mutex mutex_;
  CommunicatorPtr made_;
  std::atomic<bool> failed_{false};
};

}  // namespace tessera::comm
