// Makes process groups, and chooses their back end for CPU tensors.

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checked/checked_communicator.h"
#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/watch.h"

namespace tessera::comm {

/// What a rank knows about its job after all ranks have met in the store.
struct JobInfo {
  detail::StorePtr store;  ///< the part of the store that belongs to this job
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  /// The identity of each rank's machine. Ranks on one machine can reach each other over loopback.
  std::vector<std::string> hosts;
  /// The address of this machine for other machines. Can be "" if all ranks are on this machine.
  std::string address;
  /// The flight records (logs of the collectives) of all ranks; nullptr for one rank.
  WorldWatchPtr watch;
};
using JobPtr = std::shared_ptr<const JobInfo>;

/// Returns a part of the job's store, for `info` alone. Each `use` of a group has its own part.
detail::StorePtr store_for(const JobInfo& job, const GroupInfo& info, const std::string& use);

/// Returns `info` with its members `watch` and `ranks_here` set. `use`: a prefix of the group's
/// name in the flight record, for ranks that make several groups of the same name.
GroupInfo watched(GroupInfo info, const JobInfo& job, const std::string& use = {});

/// Makes the back end of a process group for CPU tensors. Collective. `use`: see watched().
CommunicatorPtr make_host_communicator(const JobInfo& job, const GroupInfo& info,
                                       const std::string& use = {});

/// `make` makes a process group. set_up() first waits until all ranks of `info` have called
/// set_up(), then calls `make`, and logs the call in the flight record. `use`: see watched().
/// Collective. Throws PeerError if a rank does not call set_up() in time.
using MakeGroup = std::function<CommunicatorPtr(const BegunCall& set_up)>;
CommunicatorPtr set_up(const JobInfo& job, const GroupInfo& info, const std::string& use,
                       const MakeGroup& make);

/// Makes a process group for CPU tensors. Its traffic is not counted.
CommunicatorPtr make_host_group(const JobInfo& job, const GroupInfo& info, const std::string& use);

/// Makes the process group over which the ranks of `info` compare calls (agree_on_calls()).
std::unique_ptr<LazyHostGroup> make_agreement_group(const JobPtr& job, const GroupInfo& info);

}  // namespace tessera::comm
