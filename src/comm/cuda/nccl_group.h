#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include "group_info.h"
#include "tessera/internals/detail/c10d_nccl.h"
#include "tessera/internals/detail/quiet_log.h"

namespace tessera::comm {

/// What NCCL says of a communicator's health. Apart from the group, so that the watchdog, which
/// asks for it, owns no group: a group owns the watchdog. Thread safe.
class NcclHealth {
 public:
  /// Throws Error for what NCCL found wrong since the last call: a lost connection, for example.
  void check() const;
  /// Of which communicator; nullptr: of none, which is well.
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
  /// Leaves a group that nobody has ended as it is, for the system to clean up: c10d's destructor
  /// needs CUDA, and this may be one that runs when the process ends.
  ~NcclGroup();

  const GroupInfo& info() const { return info_; }
  int device() const { return device_; }
  /// Throws Error once the group has ended.
  detail::NcclProcessGroupPtr get() const;
  const std::shared_ptr<NcclHealth>& health() const { return health_; }

  /// Closes the communicator together with all ranks of the group. Throws PeerError, and aborts, if
  /// one does not come or does not within `patience`. Does nothing once the group has ended.
  void shutdown(std::chrono::milliseconds patience);
  /// Ends the group without its peers. Errors of NCCL's do not count.
  void abort();

 private:
  /// The process group, which is nobody else's then; nullptr: taken before.
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
