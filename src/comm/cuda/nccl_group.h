#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include "group_info.h"
#include "tessera/internals/detail/c10d_nccl.h"
#include "tessera/internals/detail/c10d.h"

namespace tessera::comm {

/// NCCL's report of a communicator's health. Separate from the group, so that the watchdog, which
/// reads it, does not own the group: the group owns the watchdog. Thread safe.
class NcclHealth {
 public:
  /// Throws Error for what NCCL found wrong since the last call: a lost connection, for example.
  void check() const;
  /// The communicator to check; nullptr: none, which counts as healthy.
  void set_communicator(ncclComm_t communicator);

 private:
  mutable std::mutex mutex_;
  ncclComm_t communicator_ = nullptr;
};

/// c10d's process group for NCCL, from its set-up to its end. Thread safe.
class NcclGroup {
 public:
  /// Collective. `parent`: as in NcclPlace; nullptr: none.
  NcclGroup(const detail::StorePtr& store, GroupInfo info, int device, const NcclGroup* parent);
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  /// A group that was not ended is left to the system to clean up: c10d's destructor needs CUDA,
  /// and this destructor may run when the process ends.
  ~NcclGroup();

  const GroupInfo& info() const { return info_; }
  int device() const { return device_; }
  /// Throws Error once the group has ended.
  detail::NcclProcessGroupPtr get() const;
  const std::shared_ptr<NcclHealth>& health() const { return health_; }

  /// Closes the communicator together with all ranks of the group. Throws PeerError, and aborts, if
  /// a rank does not come, or not within `patience`. Does nothing once the group has ended.
  void shutdown(std::chrono::milliseconds patience);
  /// Ends the group without its peers. Errors of NCCL's do not count.
  void abort();

 private:
  /// Takes the process group over as its only owner; nullptr: taken before.
  detail::NcclProcessGroupPtr take();

  // libtorch's own watchdog logs pages about an error that ours says in a line.
  const detail::QuietLog quiet_;
  GroupInfo info_;
  int device_;
  mutable std::mutex mutex_;
  detail::NcclProcessGroupPtr process_group_;
  const std::shared_ptr<NcclHealth> health_ = std::make_shared<NcclHealth>();
};

}  // namespace tessera::comm
