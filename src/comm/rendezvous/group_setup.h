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

/// What a rank knows about the job's other ranks and machines after the rendezvous.
struct JobInfo {
  detail::StorePtr store;  ///< store whose keys only this job uses
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  /// host_identity() of each rank. Ranks with equal identities reach each other over loopback.
  std::vector<std::string> hosts;
  /// The address of this machine for other machines. Can be "" if all ranks are on this machine.
  std::string address;
  /// The flight records (logs of the collectives) of all ranks; nullptr for one rank.
  WorldWatchPtr watch;
  /// Whether World::shutdown() of this rank waits for the other ranks, which need this rank's
  /// store. false for world_from_broadcast(), whose ranks need not shut down in the same order.
  bool serves_store = false;
};
using JobPtr = std::shared_ptr<const JobInfo>;

/// Returns a view of the job's store with separate keys for each process group and each `use`.
detail::StorePtr store_for(const JobInfo& job, const GroupInfo& info, const std::string& use);

/// Returns `info` with `watch` and `ranks_here` set. `use`: a prefix that distinguishes, in the
/// flight record, process groups with the same name and ranks.
GroupInfo watched(GroupInfo info, const JobInfo& job, const std::string& use = {});

/// Makes the back end of a process group for CPU tensors. Collective. `use`: see watched().
CommunicatorPtr make_host_communicator(const JobInfo& job, const GroupInfo& info,
                                       const std::string& use = {});

/// Makes a process group by `make`, after all ranks of `info` have called set_up(). `use`: see
/// watched(). Collective. Throws PeerError if a rank does not call set_up() in time.
using MakeGroup = std::function<CommunicatorPtr(const BegunCall& set_up)>;
CommunicatorPtr set_up(const JobInfo& job, const GroupInfo& info, const std::string& use,
                       const MakeGroup& make);

/// Makes a process group for CPU tensors. Its collectives are not counted as traffic.
CommunicatorPtr make_host_group(const JobInfo& job, const GroupInfo& info, const std::string& use);

/// Returns a process group, made at its first use, over which agree_on_calls() compares calls.
std::unique_ptr<LazyHostGroup> make_agreement_group(const JobPtr& job, const GroupInfo& info);

}  // namespace tessera::comm
