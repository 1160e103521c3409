// The set-up of a group, and the choice of its back end on the host.

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gloo/gloo.h"
#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/group_watch.h"
#include "watch/world_watch.h"

namespace tessera::comm {

/// A rank's view of its job after the rendezvous.
struct JobInfo {
  detail::StorePtr store;  ///< shared by this job's ranks alone
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  /// The identity of each rank's host. Ranks of one host reach each other by loopback.
  std::vector<std::string> hosts;
  /// The address of this host for ranks on other hosts; may be empty if there are none.
  std::string address;
  /// The flight records of all ranks; nullptr in a world of one.
  WorldWatchPtr watch;
};
using JobPtr = std::shared_ptr<const JobInfo>;

/// A part of the job's store that only this group uses, and only for `use`.
detail::StorePtr store_for(const JobInfo& job, const GroupInfo& info, const std::string& use);

/// `info` with its hosts, and with the record that the group's ranks keep of their calls. `use`: a
/// prefix of the group's name, to keep several groups of the same ranks apart.
GroupInfo watched(GroupInfo info, const JobInfo& job, const std::string& use = {});

/// The back end of a group of CPU tensors. Collective. `use` as in watched().
CommunicatorPtr make_host_communicator(const JobInfo& job, const GroupInfo& info,
                                       const std::string& use = {});

/// Waits until all ranks of `info` have called this, then calls `make` with the recorded set-up.
/// `use` as in watched(). Collective. Throws PeerError if a rank does not come.
using MakeGroup = std::function<CommunicatorPtr(const BegunCall& set_up)>;
CommunicatorPtr set_up(const JobInfo& job, const GroupInfo& info, const std::string& use,
                       const MakeGroup& make);

/// A group between the hosts of the ranks of `info`, whose traffic is not counted.
CommunicatorPtr make_host_group(const JobInfo& job, const GroupInfo& info, const std::string& use);

/// The group over which the ranks of `info` agree on their calls.
std::unique_ptr<LazyHostGroup> make_agreement_group(const JobPtr& job, const GroupInfo& info);

}  // namespace tessera::comm
