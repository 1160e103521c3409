// Chooses the back end for CPU tensors, the same on all ranks: shared memory if every rank of a
// group can map the memory, otherwise Gloo.

#include "rendezvous/group_setup.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "backends.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/watch.h"

namespace tessera::comm {
detail::StorePtr store_for(const JobInfo& job, const GroupInfo& info, const std::string& use) {
  return detail::store_below(detail::concat(use, "/", info.name, "/", join(info.ranks)), job.store);
}

CommunicatorPtr make_host_communicator(const JobInfo& job, const GroupInfo& info,
                                       const std::string& use) {
  if (info.size() == 1) {
    return make_loopback_communicator(info);
  }
  // Machines are compared by host_identity(), because different machines can have equal names.
  const auto host_of = [&](int rank) { return job.hosts.at(static_cast<std::size_t>(rank)); };
  const bool one_host = std::ranges::all_of(
      info.ranks, [&](int rank) { return host_of(rank) == host_of(info.ranks.front()); });
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
    info.ranks_here = static_cast<int>(
        std::ranges::count(job.hosts, job.hosts.at(static_cast<std::size_t>(job.rank))));
  }
  return info;
}

CommunicatorPtr set_up(const JobInfo& job, const GroupInfo& info, const std::string& use,
                       const MakeGroup& make) {
  if (info.watch == nullptr) {
    return make(BegunCall{});
  }
  const BegunCall call = info.watch->begin("set-up");
  try {
    meet(store_for(job, info, use + "meeting"), info);
    CommunicatorPtr made = make(call);
    info.watch->leaves(call);
    return made;
  } catch (const c10::DistError& error) {
    // A DistError of c10d means that rank 0, which serves the store, has ended.
    info.watch->leaves(call);
    fail_without_peers(info, "set-up", first_line(error.what_without_backtrace()));
  } catch (...) {
    info.watch->leaves(call);
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
