#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "group_info.h"
#include "host.h"
#include "job_variables.h"
#include "store_world.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

bool serves_store(const JobVariables& job) {
  return job.rank == 0 && !job.agent_store;
}

c10d::TCPStoreOptions store_options(const JobVariables& job, const WorldOptions& options) {
  c10d::TCPStoreOptions store;
  store.port = job.port;
  store.isServer = serves_store(job);
  store.waitWorkers = false;
  store.timeout = options.timeout;
  if (store.isServer) {
    // libtorch's store listens on every interface; a job of one host has no need of that.
    store.masterListenFd = job.store_fd;
    if (!store.masterListenFd && is_loopback(job.address)) {
      store.masterListenFd = listen_on_loopback(job.port);
    }
  }
  return store;
}

/// libtorch's client waits without end for the first answer of whatever listens on the port. So it
/// is made on a thread that can be left behind.
StorePtr connect_in_time(const std::string& address, const c10d::TCPStoreOptions& options) {
  constexpr std::chrono::seconds kGrace{2};  // Its own time-out has the better message.
  std::packaged_task<StorePtr()> task(
      [=]() -> StorePtr { return c10::make_intrusive<c10d::TCPStore>(address, options); });
  std::future<StorePtr> store = task.get_future();
  std::thread(std::move(task)).detach();
  TESSERA_CHECK(store.wait_for(options.timeout + kGrace) == std::future_status::ready,
                "something that is no store listens there");
  return store.get();
}

StorePtr connect(const JobVariables& job, const WorldOptions& options) {
  const c10d::TCPStoreOptions store = store_options(job, options);
  try {
    return connect_in_time(job.address, store);
  } catch (const std::exception& error) {
    fail("rank ", job.rank, " of ", job.size, " cannot ", store.isServer ? "serve" : "reach",
         " the store at MASTER_ADDR=", job.address, " MASTER_PORT=", job.port, ": ",
         first_line(error.what()),
         "; check both variables and that rank 0 runs and the port is free");
  }
}

/// The connection lasts as long as the process: peers may still ask rank 0's store after rank 0's
/// world is gone, and a second world must not bind the port again.
StorePtr shared_store(const JobVariables& job, const WorldOptions& options) {
  static std::mutex mutex;
  static auto* const stores = new std::map<std::string, StorePtr>();
  const std::lock_guard lock(mutex);
  StorePtr& store = (*stores)[job.address + ":" + std::to_string(job.port)];
  if (store == nullptr) {
    store = connect(job, options);
  }
  return store;
}

std::string host_key(int rank) {
  return "host/" + std::to_string(rank);
}

[[noreturn]] void report_missing(c10d::Store& store, const JobVariables& job,
                                 const WorldOptions& options, const std::string& reason) {
  std::vector<int> missing;
  try {
    for (int rank = 0; rank < job.size; ++rank) {
      if (!store.check({host_key(rank)})) {
        missing.push_back(rank);
      }
    }
  } catch (const std::exception&) {
    fail("rank ", job.rank, " of ", job.size, " lost the store at ", job.address, ":", job.port,
         " during the rendezvous: ", first_line(reason), "; look for rank 0's own error");
  }
  fail("rank ", job.rank, " of ", job.size, " waited ", options.timeout.count(),
       " ms at the rendezvous, and rank(s) ", join(missing),
       " did not come; start all ranks with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE");
}

std::vector<std::string> exchange_hosts(c10d::Store& store, const JobVariables& job,
                                        const WorldOptions& options) {
  const std::string own = host_identity();
  std::vector<std::string> hosts;
  try {
    store.set(host_key(job.rank), own);
    for (int rank = 0; rank < job.size; ++rank) {
      store.wait({host_key(rank)}, options.timeout);
      hosts.push_back(store.get_to_str(host_key(rank)));
    }
  } catch (const std::exception& error) {
    report_missing(store, job, options, error.what());
  }
  return hosts;
}

/// How many earlier ranks are on this rank's host.
int local_rank_among(const std::vector<std::string>& hosts, int rank) {
  return static_cast<int>(
      std::count(hosts.begin(), hosts.begin() + rank, hosts[static_cast<std::size_t>(rank)]));
}

JobInfo meet(const JobVariables& job, const WorldOptions& options) {
  // Every rank makes its worlds in the same order, so the number tells them apart.
  static std::atomic<int> instances{0};
  const StorePtr store = c10::make_intrusive<c10d::PrefixStore>(
      job.key_prefix + "/" + std::to_string(instances++), shared_store(job, options));
  store->setTimeout(options.timeout);
  JobInfo info{store, job.rank, job.size, 0, exchange_hosts(*store, job, options), ""};
  info.local_rank = job.local_rank.value_or(local_rank_among(info.hosts, job.rank));
  const bool one_host =
      std::ranges::adjacent_find(info.hosts, std::not_equal_to<>()) == info.hosts.end();
  if (!one_host) {
    info.address = routable_address(job.address);
  }
  return info;
}

/// Where a peer is gone libtorch's store prints stack traces beside the Error that says so in a
/// line. TORCH_CPP_LOG_LEVEL, if it is set, has the last word.
void quiet_libtorch() {
  setenv("TORCH_CPP_LOG_LEVEL", "ERROR", /*overwrite=*/0);
  c10::initLogging();
}

}  // namespace

WorldPtr world_from_environment(const WorldOptions& options) {
  quiet_libtorch();
  check_options(options);
  const JobVariables job = read_job_variables(environment_variable);
  WorldOptions adjusted = options;
  adjusted.timeout = job.timeout.value_or(options.timeout);
  if (job.size == 1) {
    return make_store_world(
        {c10::make_intrusive<c10d::HashStore>(), 0, 1, job.local_rank.value_or(0), {""}, ""},
        adjusted);
  }
  return make_store_world(meet(job, adjusted), adjusted);
}

}  // namespace tessera::comm
