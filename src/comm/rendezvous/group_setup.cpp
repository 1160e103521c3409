// Chooses shared memory if all ranks of a group are on this host and can reach it, else Gloo. All
// members decide alike: from what all of them know or, for shared memory, together.

#include "rendezvous/group_setup.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "backends.h"
#include "checked/checked_communicator.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/quiet_log.h"
#include "watch/meeting.h"
#include "watch/peer_wait.h"

namespace tessera::comm {
namespace {

/// By identity, not by name: see host_identity().
bool on_one_host(const JobInfo& job, const GroupInfo& info) {
  return std::ranges::all_of(info.ranks, [&](int r) {
    return job.hosts.at(static_cast<std::size_t>(r)) ==
           job.hosts.at(static_cast<std::size_t>(job.rank));
  });
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
  const bool one_host = on_one_host(job, info);
  if (one_host) {
    if (auto shared = make_shm_communicator(store_for(job, info, use + "shm"), info)) {
      return shared;
    }
  }
  return make_gloo_communicator(store_for(job, info, use + "gloo"), info,
                                one_host ? "127.0.0.1" : job.address);
}

GroupInfo watched(GroupInfo info, const JobInfo& job, const std::string& use) {
  if (info.size() > 1) {
    info.watch = std::make_shared<GroupWatch>(job.watch, use + info.name, info.ranks);
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
    meet(*store_for(job, info, use + "meeting"), info);
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
