// A World of processes or threads. A process group uses NCCL if the options say so. Otherwise, the
// group copies CUDA tensors through CPU memory and uses a back end for CPU tensors.

#include "rendezvous/store_world.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <set>
#include <utility>

#include "backends.h"
#include "checked/checked_communicator.h"
#include "cuda/cuda_backend.h"
#include "group_info.h"
#include "host/host.h"
#include "rendezvous/group_setup.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "watch/watch.h"

namespace tessera::comm {
namespace {

/// Ignores SIGPIPE, unless the program handles this signal. SIGPIPE from the socket of a dead rank
/// would end this process before the failure is reported.
void ignore_broken_pipes() {
  struct sigaction known {};
  if (sigaction(SIGPIPE, nullptr, &known) == 0 && known.sa_handler == SIG_DFL) {
    static_cast<void>(signal(SIGPIPE, SIG_IGN));
  }
}

class StoreWorld final : public World {
 public:
  StoreWorld(JobInfo job, WorldOptions options)
      : job_(std::make_shared<const JobInfo>(std::move(job))), options_(std::move(options)) {
    ignore_broken_pipes();
    if (options_.device == "cuda") {
      use_gpu();
    }
  }
  StoreWorld(const StoreWorld&) = delete;
  StoreWorld& operator=(const StoreWorld&) = delete;
  /// Closes only NCCL groups: process groups for CPU tensors can outlive the World. After an
  /// exception, NCCL groups are aborted, because the other ranks do not call shutdown().
  ~StoreWorld() override {
    if (options_.backend != "nccl") {
      return;
    }
    if (std::uncaught_exceptions() > 0) {
      StoreWorld::abort();
    } else {
      end_left_groups();
    }
  }

  int rank() const override { return job_->rank; }
  int size() const override { return job_->size; }
  int local_rank() const override { return job_->local_rank; }
  int device_index() const override { return device_index_; }
  const WorldOptions& options() const override { return options_; }
  TrafficCounter& traffic() override { return *traffic_; }

  void set_step(std::int64_t step) override {
    if (job_->watch != nullptr) {
      job_->watch->set_step(step);
    }
  }

  CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) override {
    return known_or_made(groups_, ranks, name, [this](const GroupInfo& members) {
      const GroupInfo info = watched(members, *job_);
      CommunicatorPtr backend =
          set_up(*job_, info, "", [&](const BegunCall& call) { return make_backend(info, call); });
      // `hosts`, the CPU group that compares the ranks' calls, is made only at its first use.
      auto hosts = backend->compares_calls() ? nullptr : make_agreement_group(job_, info);
      return make_checked_communicator(std::move(backend), info, traffic_, std::move(hosts));
    });
  }

  CommunicatorPtr host_group(const std::vector<int>& ranks, const std::string& name) override {
    return known_or_made(host_groups_, ranks, name, [this](const GroupInfo& members) {
      return make_host_group(*job_, members, "hosts/");
    });
  }

  void abort() override {
    bool another_ended = false;
    if (job_->watch != nullptr) {
      another_ended = job_->watch->first_to_end(ranks_of_world(size())).has_value();
      job_->watch->give_up();
    }
    {
      const std::lock_guard lock(mutex_);
      aborted_ = true;
      for (const CommunicatorPtr& group : in_order_) {
        group->abort();
      }
    }
    if (another_ended) {
      wait_for_first_failure();
    }
  }

  void shutdown() override {
    // The other ranks may still make groups, for which they need the store.
    if (end_groups_and_watch() && job_->watch != nullptr && job_->serves_store) {
      job_->watch->await_ends();
    }
  }

  /// Closes the process groups if the program has not called shutdown(). Does not throw.
  void end_left_groups() {
    constexpr std::chrono::seconds kPatience{2};
    const std::lock_guard lock(mutex_);
    try {
      end_groups(kPatience);
    } catch (const std::exception&) {
      // Errors are ignored: programs that want the errors call shutdown().
    }
  }

 private:
  using Groups = std::map<std::pair<std::vector<int>, std::string>, CommunicatorPtr>;

  /// Returns whether this call has ended the World. A World can end only once.
  bool end_groups_and_watch() {
    const std::lock_guard lock(mutex_);
    // The WorldWatch must end last: WorldWatch checks other ranks while process groups shut down.
    const auto end = [this] {
      if (job_->watch != nullptr) {
        job_->watch->end();
      }
    };
    bool ends = false;
    try {
      ends = end_groups(options_.timeout);
    } catch (...) {
      end();
      throw;
    }
    end();
    return ends;
  }

  template <class Make>
  CommunicatorPtr known_or_made(Groups& groups, const std::vector<int>& ranks,
                                const std::string& name, const Make& make) {
    // Making a group is collective, so two threads of a rank must not make the same group twice.
    // The lock is held until the group is made.
    const std::lock_guard lock(mutex_);
    const auto key = std::make_pair(ranks, name);
    if (const auto known = groups.find(key); known != groups.end()) {
      return known->second;
    }
    TESSERA_CHECK(!ended_, "group '", name,
                  "': this rank's world has ended; make groups before World::shutdown()");
    TESSERA_CHECK(!aborted_, "group '", name,
                  "': this rank's world has failed or was aborted; start the job again");
    const GroupInfo info = info_of_group(*this, ranks, name);
    CommunicatorPtr made;
    try {
      made = make(info);
    } catch (const PeerError&) {
      aborted_ = true;  // after a failure of make(), a thread can still use the store
      throw;
    }
    groups.emplace(key, made);
    in_order_.push_back(made);
    return made;
  }

  void use_gpu() {
    const CudaBackend& cuda = cuda_backend();
    const LibraryVersions versions = cuda.versions();
    if (const std::string warning = cudnn_warning(versions); !warning.empty()) {
      TORCH_WARN(warning);
    }
    // If a machine has more ranks than GPUs, ranks share GPUs, as in tests with one GPU.
    device_index_ = job_->local_rank % cuda.device_count();
    cuda.set_device(device_index_);
    if (options_.backend == "nccl") {
      check_nccl(versions);
    }
  }

  /// Closes process groups, the newest first. After a failure, aborts the other process groups
  /// without waiting for other ranks. The caller must hold the lock. Returns false if the World has
  /// ended or failed before.
  bool end_groups(std::chrono::milliseconds patience) {
    if (aborted_ || std::exchange(ended_, true)) {
      return false;
    }
    std::exception_ptr failure;
    for (auto made = in_order_.rbegin(); made != in_order_.rend(); ++made) {
      const CommunicatorPtr& group = *made;
      try {
        if (failure == nullptr) {
          group->shutdown(patience);
        } else {
          group->abort();
        }
      } catch (const std::exception&) {
        failure = failure == nullptr ? std::current_exception() : failure;
      }
    }
    if (failure != nullptr) {
      std::rethrow_exception(failure);
    }
    return true;
  }

  CommunicatorPtr make_backend(const GroupInfo& info, const BegunCall& set_up) {
    if (info.size() == 1) {
      return make_loopback_communicator(info);
    }
    if (options_.backend == "nccl") {
      return make_nccl(info, set_up);
    }
    CommunicatorPtr host = make_host_communicator(*job_, info);
    return options_.device == "cuda" ? make_staged_communicator(std::move(host)) : host;
  }

  /// Makes an NCCL group. If all ranks make groups of this name at the same time, splits one
  /// communicator of all ranks. Splitting is faster than making new communicators.
  CommunicatorPtr make_nccl(const GroupInfo& info, const BegunCall& set_up) {
    const bool whole = info.size() == size();
    const std::string meeting =
        detail::concat("split-meeting/", info.name, "/", times_named_[info.name]++);
    const bool split = !whole && all_come_at_once(job_->store, store_for(*job_, info, "split"),
                                                  info, size(), meeting);
    if (split && nccl_of_all_ == nullptr) {
      const GroupInfo all = watched(info_of_group(*this, ranks_of_world(size()), "split"), *job_);
      const BegunCall set_up_of_all = all.watch->begin("set-up");
      nccl_of_all_ = nccl_group(all, set_up_of_all, nullptr);
      all.watch->leaves(set_up_of_all);
      in_order_.push_back(make_checked_communicator(nccl_of_all_, all, traffic_));
    }
    CommunicatorPtr made = nccl_group(info, set_up, whole || split ? nccl_of_all_ : nullptr);
    if (whole && nccl_of_all_ == nullptr) {
      nccl_of_all_ = made;
    }
    return made;
  }

  /// Makes an NCCL group. During the set-up, the watchdog (await_device) checks the other ranks,
  /// because NCCL would wait forever for a dead rank.
  CommunicatorPtr nccl_group(const GroupInfo& info, const BegunCall& set_up,
                             CommunicatorPtr parent) const {
    const auto running = std::make_shared<int>();
    info.watch->world().await_device(
        [call = std::weak_ptr<int>(running)] { return call.expired(); }, set_up);
    return cuda_backend().make_nccl_communicator(
        store_for(*job_, info, "nccl"), info,
        {.device = device_index_, .parent = std::move(parent)});
  }

  // The JobInfo is shared, because process groups for CPU tensors can outlive the World.
  JobPtr job_;
  WorldOptions options_;
  int device_index_ = -1;
  TrafficCounterPtr traffic_ = std::make_shared<TrafficCounter>();
  std::mutex mutex_;
  bool aborted_ = false;
  bool ended_ = false;
  std::vector<CommunicatorPtr> in_order_;  ///< all process groups, the oldest first
  /// The NCCL group of all ranks, from which NCCL groups are split; nullptr before its first use.
  CommunicatorPtr nccl_of_all_;
  /// How many NCCL groups of each name this rank has made. Ranks can have different counts.
  std::map<std::string, int> times_named_;
  // Process groups are cached for the life of the World, because several meshes share groups.
  Groups groups_, host_groups_;
};

/// Closes the process groups of open Worlds when main() returns or the program calls exit().
/// Destructors of static objects run later, when CUDA is no longer usable.
class LeftWorlds {
 public:
  LeftWorlds() = default;
  LeftWorlds(const LeftWorlds&) = delete;
  LeftWorlds& operator=(const LeftWorlds&) = delete;
  ~LeftWorlds() {
    for (const std::weak_ptr<StoreWorld>& left : worlds_) {
      if (const auto world = left.lock()) {
        world->end_left_groups();
      }
    }
  }

  void add(const std::shared_ptr<StoreWorld>& world) { worlds_.push_back(world); }

 private:
  std::vector<std::weak_ptr<StoreWorld>> worlds_;
};

}  // namespace

void check_options(const WorldOptions& options) {
  // The environment variables are read only to check them: an invalid value throws on every rank
  // before any rank waits for other ranks.
  for (const char* name : {"TESSERA_SHM", "TESSERA_STRICT", "TESSERA_DEBUG"}) {
    tessera::detail::environment_switch(name);
  }
  TESSERA_CHECK(options.device == "cpu" || options.device == "cuda", "WorldOptions: device '",
                options.device, "' is unknown; use \"cpu\" or \"cuda\"");
  TESSERA_CHECK(options.backend == "gloo" || options.backend == "nccl", "WorldOptions: backend '",
                options.backend, "' is unknown; use \"gloo\" or \"nccl\"");
  TESSERA_CHECK(options.backend != "nccl" || options.device == "cuda",
                "WorldOptions: backend nccl needs device cuda; use gloo on cpu");
  TESSERA_CHECK(options.timeout.count() > 0, "WorldOptions: the timeout is ",
                options.timeout.count(), " ms; pass a timeout above 0");
  TESSERA_CHECK(options.watchdog.count() >= 0, "WorldOptions: the watchdog limit is ",
                options.watchdog.count(),
                " ms; pass a limit above 0, or 0 to turn the watchdog off");
}

// Every rank checks `ranks` before anything is sent, so that an invalid list is an Error and not a
// time-out.
GroupInfo info_of_group(const World& world, const std::vector<int>& ranks,
                        const std::string& name) {
  const auto self = std::ranges::find(ranks, world.rank());
  const bool in_range =
      std::ranges::all_of(ranks, [&](int rank) { return rank >= 0 && rank < world.size(); });
  const bool unique = std::set<int>(ranks.begin(), ranks.end()).size() == ranks.size();
  TESSERA_CHECK(in_range && unique, "group '", name, "' of ranks ", join(ranks),
                ": a rank is repeated or outside the world of ", world.size(),
                "; pass each rank once, from 0 to ", world.size() - 1);
  TESSERA_CHECK(self != ranks.end(), "group '", name, "' of ranks ", join(ranks), ": rank ",
                world.rank(), " is not a member; only members may make the group");
  return {name, ranks, static_cast<int>(self - ranks.begin()), world.options().timeout, nullptr};
}

int next_world_number() {
  static std::atomic<int> worlds{0};
  return worlds++;
}

WatchSettings watch_settings(int rank, int world, const WorldOptions& options) {
  return {rank, world, options.watchdog, options.timeout};
}

WorldPtr make_store_world(JobInfo job, const WorldOptions& options) {
  auto world = std::make_shared<StoreWorld>(std::move(job), options);
  if (options.backend == "nccl" && getpid() == gettid()) {
    thread_local LeftWorlds left;
    left.add(world);
  }
  return world;
}

WorldScope::~WorldScope() {
  try {
    if (std::uncaught_exceptions() > exceptions_) {
      world_->abort();
    } else {
      world_->shutdown();
    }
  } catch (const std::exception& error) {
    TORCH_WARN(error.what());
  }
}

}  // namespace tessera::comm
