// Makes a World from the launcher's environment variables, or from the program's own broadcast.
// Through a TCP store, the ranks find out which ranks are on the same machine.

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <exception>
#include <functional>
#include <future>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include "group_info.h"
#include "host/host.h"
#include "rendezvous/rendezvous_wait.h"
#include "rendezvous/store_world.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/core/process.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/watch.h"

namespace tessera::comm {
namespace {

// JobWarnings shows each warning once in a job. Ranks communicate through the store instead of a
// collective, because ranks warn at different times.

std::string in_one_line(std::string text) {
  for (char& c : text) {
    c = c == '\n' ? ' ' : c;
  }
  return text.substr(0, text.find_last_not_of(' ') + 1);
}

class JobWarnings final : public c10::WarningHandler {
 public:
  void set_job(const JobInfo& job) {
    const std::lock_guard lock(mutex_);
    store_ = job.store;
    rank_ = job.rank;
    size_ = job.size;
  }

  // Catches all exceptions, because an error in showing a warning must not end the program.
  void process(const c10::Warning& warning) override try {
    const std::lock_guard lock(mutex_);
    const std::string text = in_one_line(warning.msg());
    if (shown_.insert(text).second && is_first_of_job(text)) {
      // The line is written in one call, so that lines of several ranks do not mix.
      std::cerr << detail::concat("tessera: warning: ", text, " [rank ", rank_, "]\n")
                << std::flush;
    }
  } catch (...) {
  }

 private:
  bool is_first_of_job(const std::string& text) {
    if (size_ == 1) {
      return true;
    }
    const std::string key = "warning/" + std::to_string(std::hash<std::string>()(text));
    // If the store does not answer, for example because rank 0 has ended, the warning is shown. A
    // warning that is shown twice is better than a lost warning.
    try {
      auto answer = ask(store_, [key](detail::Store& store) { return store.add(key, 1) == 1; });
      return answer.wait_for(std::chrono::seconds(1)) != std::future_status::ready || answer.get();
    } catch (const std::exception&) {
      return true;
    }
  }

  std::mutex mutex_;
  detail::StorePtr store_;
  int rank_ = 0;
  int size_ = 1;
  std::unordered_set<std::string> shown_;
};

/// The handler of libtorch's warnings; nullptr before the process has made a World.
std::atomic<JobWarnings*> handler_of_job = nullptr;

}  // namespace

void take_warnings_of_thread() {
  JobWarnings* handler = handler_of_job;
  // Replaces only libtorch's default handler, whose class is exactly c10::WarningHandler.
  const c10::WarningHandler& now = *c10::WarningUtils::get_warning_handler();
  if (handler != nullptr && typeid(now) == typeid(c10::WarningHandler)) {
    c10::WarningUtils::set_warning_handler(handler);
  }
}

namespace {

/// Prints this thread's warnings (TORCH_WARN) on standard error as "tessera: warning: TEXT [rank
/// 0]", each text once per job. Does not replace a handler that the program has set.
void show_warnings_once(const JobInfo& job) {
  // The handler is never destroyed, because threads can warn while the process ends.
  static auto& handler = *new JobWarnings;
  handler.set_job(job);
  handler_of_job = &handler;
  take_warnings_of_thread();
}

using detail::StorePtr;

/// Whether this rank serves the job's store. Under torchrun, torchrun's agent can serve the store.
bool serves_store(const JobVariables& job) {
  return job.rank == 0 && !job.agent_store;
}

/// Returns the settings of the TCP store. The store's own wait for all ranks is disabled, because
/// await_all_ranks() waits and can name missing ranks.
detail::TcpStore store_of(const JobVariables& job, const WorldOptions& options) {
  detail::TcpStore store{.address = job.address,
                         .port = job.port,
                         .serves = serves_store(job),
                         .timeout = options.timeout};
  if (store.serves) {
    // On one machine the store gets a socket on loopback. By default libtorch's store would listen
    // on every network interface.
    store.listens_on = job.store_fd;
    if (!store.listens_on && is_loopback(job.address)) {
      store.listens_on = listen_on_loopback(job.port);
    }
  }
  return store;
}

/// Connects to the store on a detached thread, because libtorch's client can wait forever. The
/// thread has its own copy of the arguments.
StorePtr connect_in_time(const detail::TcpStore& where, const JobVariables& job,
                         const WorldOptions& options) {
  // libtorch's time-out error has a better message, so this function waits longer than libtorch.
  constexpr std::chrono::milliseconds kGrace{2000};
  constexpr std::chrono::milliseconds kPoll{100};
  std::packaged_task<StorePtr()> task([where] { return detail::connect_store(where); });
  std::future<StorePtr> store = task.get_future();
  std::thread(std::move(task)).detach();
  bool said = false;
  for (std::chrono::milliseconds waited{0}; store.wait_for(kPoll) != std::future_status::ready;
       waited += kPoll) {
    TESSERA_CHECK(waited < options.timeout + kGrace, "no store has answered within ",
                  options.timeout.count(), " ms");
    say_wait(job, options, waited, job.rank == 0 ? std::vector<int>() : std::vector<int>{0}, said);
  }
  return store.get();
}

/// Connects to the store. An error message contains libtorch's message, the address, and the
/// environment variables of the address.
StorePtr connect(const JobVariables& job, const WorldOptions& options) {
  try {
    return connect_in_time(store_of(job, options), job, options);
  } catch (const std::exception& error) {
    const std::string unknown = why_unknown(job.address);
    const std::string message = tessera::detail::concat(
        "rank ", job.rank, " of ", job.size, " cannot ", serves_store(job) ? "serve" : "reach",
        " the store at MASTER_ADDR=", job.address, " MASTER_PORT=", job.port, ": ",
        unknown.empty() ? first_line(error.what()) : "the host is unknown: " + unknown,
        "; check both variables, that rank 0 runs and that the port is free; the number of ranks "
        "comes from ",
        job.launcher);
    if (serves_store(job)) {
      throw Error(message);
    }
    wait_for_first_failure();
    throw PeerError(message);
  }
}

/// Returns a connection to the store, which stays open until the process ends. Other ranks can need
/// the store later. A second World reuses the connection.
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

/// Returns the number of ranks below `rank` on the machine of `rank`.
int local_rank_among(const std::vector<std::string>& hosts, int rank) {
  return static_cast<int>(
      std::count(hosts.begin(), hosts.begin() + rank, hosts[static_cast<std::size_t>(rank)]));
}

/// Makes the WorldWatch, which detects dead ranks. `store`: the job's store.
WorldWatchPtr make_watch(const WatchSettings& settings, std::vector<RecordPtr> records,
                         const StorePtr& store) {
  const bool all_near = std::ranges::find(records, nullptr) == records.end();
  return std::make_shared<WorldWatch>(
      settings, std::move(records),
      all_near ? nullptr : detail::store_below("watch", store->clone()));
}

/// Waits until all ranks of `job` have announced themselves in `store`, which only these ranks may
/// use. `own`: the flight record (log of calls) of this rank.
JobInfo meet(const JobVariables& job, const StorePtr& store, const RecordPtr& own,
             const WatchSettings& settings, const WorldOptions& options) {
  // While c10d makes a process group, it waits for other ranks for at most the store's time-out.
  store->setTimeout(options.timeout);
  JobInfo info{store, job.rank, job.size, 0, {}, "", nullptr};
  std::vector<RecordPtr> records;
  for (Arrival& arrival : await_all_ranks(*store, job, options, own)) {
    info.hosts.push_back(std::move(arrival.host));
    records.push_back(std::move(arrival.record));
  }
  info.watch = make_watch(settings, std::move(records), store);
  info.local_rank = job.local_rank.value_or(local_rank_among(info.hosts, job.rank));
  const bool one_host =
      std::ranges::adjacent_find(info.hosts, std::not_equal_to<>()) == info.hosts.end();
  if (!one_host) {
    // Ranks on one machine use loopback; routable_address() can fail on a machine without network.
    info.address = routable_address(job.address);
  }
  return info;
}

JobInfo meet_by_environment(const JobVariables& job, const WorldOptions& options) {
  // next_world_number() cannot be used here, because its result differs between ranks if only some
  // ranks have called world_from_broadcast().
  static std::atomic<int> meetings{0};
  const StorePtr store = detail::store_below(job.key_prefix + "/" + std::to_string(meetings++),
                                             shared_store(job, options));
  const WatchSettings settings = watch_settings(job.rank, next_world_number(), options);
  const std::string folder = environment_variable("TESSERA_RUN_DIR").value_or("");
  JobInfo info = meet(job, store, make_record(settings, job.size, folder), settings, options);
  info.serves_store = serves_store(job);
  return info;
}

/// Returns the JobInfo of a job with one rank: the store is in memory, and no socket is opened.
JobInfo alone(const JobVariables& job) {
  return {detail::memory_store(), 0, 1, job.local_rank.value_or(0), {""}, "", nullptr};
}

WorldOptions with_time_limits_of(const JobVariables& job, WorldOptions options) {
  options.timeout = job.timeout.value_or(options.timeout);
  options.watchdog = job.watchdog.value_or(options.watchdog);
  return options;
}

WorldPtr make_world(const JobInfo& job, const WorldOptions& options) {
  show_warnings_once(job);
  return make_store_world(job, options);
}

}  // namespace

WorldPtr world_from_environment(const WorldOptions& options) {
  detail::read_log_level();
  check_options(options);
  const JobVariables job = read_job_variables(environment_variable);
  const WorldOptions adjusted = with_time_limits_of(job, options);
  return make_world(job.size == 1 ? alone(job) : meet_by_environment(job, adjusted), adjusted);
}

// world_from_broadcast() makes a World of ranks that another library has started. The program's
// broadcast sends the address of rank 0's store to the other ranks.

namespace {

/// What rank 0 broadcasts: the address of its store, or why rank 0 could not open a store.
struct MeetingPlace {
  std::string host;     ///< host_identity() of rank 0
  std::string address;  ///< address of rank 0's machine, for ranks on other machines
  std::string port;
  std::string error;  ///< why rank 0 could not open its store; "" if it could
};

/// The size of rank 0's broadcast in bytes. A longer error message is truncated.
constexpr std::size_t kPlaceBytes = 1024;

/// Opens rank 0's store on a free port until the process ends. Does not throw, because other ranks
/// wait for the broadcast.
StorePtr open_store(MeetingPlace& place, const WorldOptions& options) {
  static std::mutex mutex;
  static auto* const stores = new std::vector<StorePtr>();
  try {
    place.host = host_identity();
    place.address = environment_variable("GLOO_SOCKET_IFNAME") ? routable_address({}) : host_name();
    StorePtr store = detail::connect_store(
        {.address = "127.0.0.1", .port = 0, .serves = true, .timeout = options.timeout});
    place.port = std::to_string(detail::port_of(store));
    const std::lock_guard lock(mutex);
    return stores->emplace_back(std::move(store));
  } catch (const std::exception& error) {
    place.error = first_line(error.what());
    return nullptr;
  }
}

StorePtr connect_to(const MeetingPlace& place, const JobVariables& job,
                    const WorldOptions& options) {
  try {
    return connect_in_time({.address = place.host == host_identity() ? "127.0.0.1" : job.address,
                            .port = job.port,
                            .timeout = options.timeout},
                           job, options);
  } catch (const std::exception& error) {
    throw PeerError(detail::concat("rank ", job.rank, " of ", job.size,
                                   " cannot reach the store of rank 0 at ", job.address, ":",
                                   job.port, ": ", first_line(error.what()),
                                   "; check that rank 0 runs and that this host resolves the "
                                   "address, or set GLOO_SOCKET_IFNAME to the network interface "
                                   "that connects the hosts"));
  }
}

using Broadcast = std::function<void(void* bytes, std::size_t count)>;

JobInfo meet_by_broadcast(JobVariables job, const Broadcast& broadcast,
                          const WorldOptions& options) {
  MeetingPlace place;
  StorePtr store = job.rank == 0 ? open_store(place, options) : nullptr;
  std::string text = place.host + '\n' + place.address + '\n' + place.port + '\n' + place.error;
  text.resize(kPlaceBytes);
  broadcast(text.data(), text.size());
  std::vector<std::string> lines = lines_of(text.substr(0, text.find('\0')));
  lines.resize(4);  // lines_of() omits an empty last line (no error)
  place = {lines[0], lines[1], lines[2], lines[3]};
  TESSERA_CHECK(place.error.empty() && !place.port.empty(), "rank 0 of ", job.size,
                " cannot open a store for the world of these ranks: ", place.error,
                "; correct this error on the host of rank 0");
  job.address = place.address;
  job.port = static_cast<std::uint16_t>(std::stoi(place.port));
  if (store == nullptr) {
    store = connect_to(place, job, options);
  }
  // The flight record is in memory. The name of a file would contain the rank, but a process can
  // have different ranks in different Worlds.
  const WatchSettings settings = watch_settings(job.rank, next_world_number(), options);
  return meet(job, detail::store_below("tessera", store), make_record(settings, job.size, ""),
              settings, options);
}

}  // namespace

WorldPtr world_from_broadcast(int rank, int size, const Broadcast& broadcast,
                              const WorldOptions& options) {
  detail::read_log_level();
  check_options(options);
  TESSERA_CHECK(size >= 1 && rank >= 0 && rank < size, "world_from_broadcast: rank ", rank, " of ",
                size, " ranks was passed; pass 0 <= rank < size");
  TESSERA_CHECK(broadcast != nullptr || size == 1,
                "world_from_broadcast: the broadcast is empty; pass a broadcast function");
  JobVariables job;
  job.launcher = "the ranks of world_from_broadcast";
  job.rank = rank;
  job.size = size;
  read_time_limits(environment_variable, job);
  const WorldOptions adjusted = with_time_limits_of(job, options);
  return make_world(size == 1 ? alone(job) : meet_by_broadcast(job, broadcast, adjusted), adjusted);
}

// run_main() ends a rank's process after an uncaught exception, with one line that says which rank
// failed and why.

namespace {

/// Returns the prefix of error messages: "rank 2 of 4: ". Returns "" for a single rank, for invalid
/// launcher variables, and under tessera-run, which adds the rank itself.
std::string name_of_rank() {
  try {
    const JobVariables job = read_job_variables(&environment_variable);
    const bool is_known = job.size == 1 || environment_variable("TESSERA_JOB_TOKEN");
    return is_known ? "" : tessera::detail::concat("rank ", job.rank, " of ", job.size, ": ");
  } catch (const std::exception&) {
    return "";
  }
}

}  // namespace

int run_main(const std::function<void()>& body) {
  // If SIGXFSZ is ignored, writing a file above the size limit is an error and does not kill the
  // process.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    body();
    files::flush_output();
    return 0;
  } catch (const c10::Error& error) {
    tessera::end_program(name_of_rank() + "error", error.what_without_backtrace());
  } catch (const std::exception& error) {
    tessera::end_program(name_of_rank() + "error", error.what());
  }
}

}  // namespace tessera::comm
