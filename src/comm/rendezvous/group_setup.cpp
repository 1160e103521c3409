// Chooses shared memory if all ranks of a group are on this host and can reach it; both, if those
// of each host can; else Gloo. All members decide alike: from what all of them know or, for shared
// memory, together.

#include "rendezvous/group_setup.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "backends.h"
#include "checked/checked_communicator.h"
#include "hierarchy/hierarchical_communicator.h"
#include "hierarchy/host_layout.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/meeting.h"
#include "watch/peer_wait.h"

namespace tessera::comm {
namespace {

/// By identity, not by name: see host_identity().
std::vector<int> hosts_of(const JobInfo& job, const std::vector<int>& ranks) {
  std::map<std::string, int> known;
  std::vector<int> hosts;
  for (const int rank : ranks) {
    const auto& host = job.hosts.at(static_cast<std::size_t>(rank));
    hosts.push_back(known.emplace(host, static_cast<int>(known.size())).first->second);
  }
  return hosts;
}

/// The group of some ranks of a group.
GroupInfo part_of(const GroupInfo& info, const char* which, const std::vector<int>& members) {
  GroupInfo part{info.name + which, {}, 0, info.timeout, info.watch, {}, info.ranks_here};
  for (const int member : members) {
    if (member == info.rank) {
      part.rank = part.size();
    }
    part.ranks.push_back(info.ranks[static_cast<std::size_t>(member)]);
    part.hosts.push_back(info.hosts[static_cast<std::size_t>(member)]);
  }
  return part;
}

/// Whether each host says yes: its leader, for all of its ranks.
bool all_hosts_say(const detail::StorePtr& store, const GroupInfo& info, const HostLayout& layout,
                   bool yes) {
  const auto key = [](int host) { return "host" + std::to_string(host); };
  if (layout.local == 0) {
    tell(store, info, key(layout.host), yes ? "yes" : "no");
  }
  bool result = true;
  for (int host = 0; host < layout.hosts(); ++host) {
    result = value_from(store, info, layout.leader(host), key(host)) == "yes" && result;
  }
  return result;
}

/// nullptr on every rank where the ranks of a host cannot share memory, or each host has one.
CommunicatorPtr make_hierarchy(const JobInfo& job, const GroupInfo& info,
                               const HostLayout& layout) {
  if (layout.hosts() == info.size()) {
    return nullptr;
  }
  const auto own = layout.order.begin() + layout.first_here();
  const GroupInfo here = part_of(info, " inside a host", {own, own + layout.count_here()});
  CommunicatorPtr inside = here.size() == 1
                               ? make_solo_communicator()
                               : make_shm_communicator(store_for(job, here, "shm"), here);
  if (!all_hosts_say(store_for(job, info, "hosts"), info, layout, inside != nullptr)) {
    return nullptr;
  }
  std::vector<int> leaders;
  for (int host = 0; host < layout.hosts(); ++host) {
    leaders.push_back(layout.leader(host));
  }
  GroupInfo between = part_of(info, " between hosts", leaders);
  between.rank = layout.host;
  CommunicatorPtr over_link;
  if (layout.local == 0) {
    over_link = make_gloo_communicator(store_for(job, between, "gloo"), between, job.address);
  }
  return make_hierarchical_communicator(
      {info, layout, std::move(inside), std::move(between), std::move(over_link),
       [store = store_for(job, info, "gloo"), info, address = job.address] {
         return make_gloo_communicator(store, info, address);
       }});
}

}  // namespace

detail::StorePtr store_for(const JobInfo& job, const GroupInfo& info, const std::string& use) {
  return detail::store_below(detail::concat(use, "/", info.name, "/", join(info.ranks)), job.store);
}

CommunicatorPtr make_host_communicator(const JobInfo& job, const GroupInfo& info,
                                       const std::string& use) {
  if (info.size() == 1) {
    return make_solo_communicator();
  }
  const HostLayout layout(info);
  const bool one_host = layout.hosts() == 1;
  if (one_host) {
    if (auto shared = make_shm_communicator(store_for(job, info, use + "shm"), info)) {
      return shared;
    }
  } else if (use.empty()) {  // what the others exchange is too little
    if (auto composed = make_hierarchy(job, info, layout)) {
      return composed;
    }
  }
  return make_gloo_communicator(store_for(job, info, use + "gloo"), info,
                                one_host ? "127.0.0.1" : job.address);
}

GroupInfo watched(GroupInfo info, const JobInfo& job, const std::string& use) {
  if (info.size() > 1) {
    info.watch = std::make_shared<GroupWatch>(job.watch, use + info.name, info.ranks);
    info.hosts = hosts_of(job, info.ranks);
    info.ranks_here = static_cast<int>(
        std::ranges::count(job.hosts, job.hosts.at(static_cast<std::size_t>(job.rank))));
  }
  return info;
}

CommunicatorPtr set_up(const JobInfo& job, const GroupInfo& info, const std::string& use,
                       const MakeGroup& make) {
  const detail::QuietLog quiet;  // ranks and back ends meet through the store
  if (info.watch == nullptr) {
    return make(BegunCall{});
  }
  const BegunCall call = info.watch->begin("set-up", "", 0);
  try {
    meet(store_for(job, info, use + "meeting"), info);
    CommunicatorPtr made = make(call);
    info.watch->done(call);
    return made;
  } catch (const c10::DistError& error) {
    // The store went with rank 0.
    info.watch->failed(call);
    fail_without_peers(info, "set-up", first_line(error.what_without_backtrace()));
  } catch (...) {
    info.watch->failed(call);
    throw;
  }
}

CommunicatorPtr make_host_group(const JobInfo& job, const GroupInfo& info, const std::string& use) {
  const GroupInfo hosts = watched(info, job, use);
  return make_checked_communicator(
      set_up(job, hosts, use,
             [&](const BegunCall&) { return make_host_communicator(job, hosts, use); }),
      hosts, std::make_shared<TrafficCounter>());
}

std::unique_ptr<LazyHostGroup> make_agreement_group(const JobPtr& job, const GroupInfo& info) {
  return std::make_unique<LazyHostGroup>(
      [job, info] { return make_host_group(*job, info, "agreement/"); });
}

}  // namespace tessera::comm
