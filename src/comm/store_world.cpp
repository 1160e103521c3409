#include "store_world.h"

#include <signal.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "checked_communicator.h"
#include "cuda_backend.h"
#include "gloo_communicator.h"
#include "group_info.h"
#include "loopback_communicator.h"
#include "shm_communicator.h"
#include "staged_communicator.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// libtorch's flight recorder, on by default, races between ranks that are threads of one process.
void disable_flight_recorder() {
  static const int done = setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  static_cast<void>(done);
}

/// Gloo and the store write to sockets: at one that a dead peer has left, the signal would end this
/// rank before it could say so. A handler of the program's own stays.
void ignore_broken_pipes() {
  struct sigaction known {};
  if (sigaction(SIGPIPE, nullptr, &known) == 0 && known.sa_handler == SIG_DFL) {
    static_cast<void>(signal(SIGPIPE, SIG_IGN));
  }
}

using JobPtr = std::shared_ptr<const JobInfo>;

/// Keys of this group and this use of it alone.
c10::intrusive_ptr<c10d::Store> store_for(const JobInfo& job, const GroupInfo& info,
                                          const std::string& use) {
  return c10::make_intrusive<c10d::PrefixStore>(
      detail::concat(use, "/", info.name, "/", join(info.ranks)), job.store);
}

bool on_one_host(const JobInfo& job, const GroupInfo& info) {
  return std::ranges::all_of(info.ranks, [&](int r) {
    return job.hosts.at(static_cast<std::size_t>(r)) ==
           job.hosts.at(static_cast<std::size_t>(job.rank));
  });
}

/// `use`: in front of the name of the backend, to keep several such groups of the same ranks apart.
CommunicatorPtr make_host_communicator(const JobInfo& job, const GroupInfo& info,
                                       const std::string& use = {}) {
  const bool one_host = on_one_host(job, info);
  if (one_host) {
    if (auto shared = make_shm_communicator(store_for(job, info, use + "shm"), info)) {
      return shared;
    }
  }
  return make_gloo_communicator(store_for(job, info, use + "gloo"), info,
                                one_host ? "127.0.0.1" : job.address);
}

/// Over which the ranks of `info` agree on their calls.
std::unique_ptr<LazyHostGroup> make_agreement_group(const JobPtr& job, const GroupInfo& info) {
  return std::make_unique<LazyHostGroup>(
      store_for(*job, info, "agreement/meeting"), info,
      [job, info] { return make_host_communicator(*job, info, "agreement/"); });
}

class StoreWorld final : public World {
 public:
  StoreWorld(JobInfo job, WorldOptions options)
      : job_(std::make_shared<const JobInfo>(std::move(job))), options_(std::move(options)) {
    disable_flight_recorder();
    ignore_broken_pipes();
    if (options_.device == "cuda") {
      const CudaBackend& cuda = cuda_backend();
      cuda.set_device(job_->local_rank % cuda.device_count());
    }
  }

  int rank() const override { return job_->rank; }
  int size() const override { return job_->size; }
  int local_rank() const override { return job_->local_rank; }
  const WorldOptions& options() const override { return options_; }
  TrafficCounter& traffic() override { return *traffic_; }

  CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) override {
    const std::lock_guard lock(mutex_);
    const auto key = std::make_pair(ranks, name);
    if (const auto known = groups_.find(key); known != groups_.end()) {
      return known->second;
    }
    TESSERA_CHECK(!aborted_, "group '", name,
                  "': this rank's world was aborted; start the job again");
    const GroupInfo info = checked_info(ranks, name);
    CommunicatorPtr backend = make_backend(info);
    auto hosts = backend->compares_calls() ? nullptr : make_agreement_group(job_, info);
    auto made = make_checked_communicator(std::move(backend), info, traffic_, std::move(hosts));
    groups_.emplace(key, made);
    return made;
  }

  void abort() override {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    for (const auto& [key, communicator] : groups_) {
      communicator->abort();
    }
  }

 private:
  GroupInfo checked_info(const std::vector<int>& ranks, const std::string& name) const {
    const auto self = std::ranges::find(ranks, rank());
    const bool in_range =
        std::ranges::all_of(ranks, [this](int r) { return r >= 0 && r < size(); });
    const bool unique = std::set<int>(ranks.begin(), ranks.end()).size() == ranks.size();
    TESSERA_CHECK(in_range && unique, "group '", name, "' of ranks ", join(ranks),
                  ": a rank is repeated or outside the world of ", size(),
                  "; give each member once, 0 to ", size() - 1);
    TESSERA_CHECK(self != ranks.end(), "group '", name, "' of ranks ", join(ranks), ": rank ",
                  rank(), " is not a member; only members may ask for it");
    return {name, ranks, static_cast<int>(self - ranks.begin()), options_.timeout};
  }

  CommunicatorPtr make_backend(const GroupInfo& info) const {
    if (info.size() == 1) {
      return make_solo_communicator();
    }
    if (options_.backend == "nccl") {
      return cuda_backend().make_nccl_communicator(store_for(*job_, info, "nccl"), info);
    }
    CommunicatorPtr host = make_host_communicator(*job_, info);
    return options_.device == "cuda" ? make_staged_communicator(std::move(host)) : host;
  }

  JobPtr job_;
  WorldOptions options_;
  TrafficCounterPtr traffic_ = std::make_shared<TrafficCounter>();
  std::mutex mutex_;
  bool aborted_ = false;
  std::map<std::pair<std::vector<int>, std::string>, CommunicatorPtr> groups_;
};

}  // namespace

void check_options(const WorldOptions& options) {
  TESSERA_CHECK(options.device == "cpu" || options.device == "cuda", "WorldOptions: device '",
                options.device, "' is unknown; use \"cpu\" or \"cuda\"");
  TESSERA_CHECK(options.backend == "gloo" || options.backend == "nccl", "WorldOptions: backend '",
                options.backend, "' is unknown; use \"gloo\" or \"nccl\"");
  TESSERA_CHECK(options.backend == "gloo" || options.device == "cuda",
                "WorldOptions: backend nccl needs device cuda; use gloo on cpu");
  TESSERA_CHECK(options.timeout.count() > 0, "WorldOptions: the time-out of ",
                options.timeout.count(), " ms leaves no time; give more than 0");
}

WorldPtr make_store_world(JobInfo job, const WorldOptions& options) {
  return std::make_shared<StoreWorld>(std::move(job), options);
}

}  // namespace tessera::comm
