// How the ranks of a group meet, and which back end a group on the host gets.

#pragma once

#include <functional>
#include <memory>
#include <string>

#include "gloo/lazy_host_group.h"
#include "group_info.h"
#include "rendezvous/job_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/group_watch.h"

namespace tessera::comm {

/// Keys of this group and this use of it alone.
detail::StorePtr store_for(const JobInfo& job, const GroupInfo& info, const std::string& use);

/// `info` with its hosts, and with the record that the group's ranks keep of their calls. `use`: a
/// prefix of the group's name, to keep several groups of the same ranks apart.
GroupInfo watched(GroupInfo info, const JobInfo& job, const std::string& use = {});

/// The back end of a group of CPU tensors. Collective. `use` as in watched().
CommunicatorPtr make_host_communicator(const JobInfo& job, const GroupInfo& info,
                                       const std::string& use = {});

/// Makes a group of `info` once all its ranks are there: `make` is given this set-up. `use` as in
/// watched(). Collective; throws PeerError where a rank does not come.
using MakeGroup = std::function<CommunicatorPtr(const BegunCall& set_up)>;
CommunicatorPtr set_up(const JobInfo& job, const GroupInfo& info, const std::string& use,
                       const MakeGroup& make);

/// A group between the hosts of the ranks of `info`, whose traffic is not counted.
CommunicatorPtr make_host_group(const JobInfo& job, const GroupInfo& info, const std::string& use);

/// The group over which the ranks of `info` agree on their calls.
std::unique_ptr<LazyHostGroup> make_agreement_group(const JobPtr& job, const GroupInfo& info);

}  // namespace tessera::comm
