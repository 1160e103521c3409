// The environment of a rank, as launchers write it, turned into one description. Values come
// through a function, so that tests need not change the process's environment. A value that does
// not fit is an error here, with the variable's name: later it would be a rendezvous that never
// completes.

#include "host/job_variables.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// The variables of one kind of launcher.
/// `name` is for messages. `local_size` says how many ranks are on this host.
struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

/// In order of precedence: tessera-run and torchrun may themselves run under Slurm or Open MPI. The
/// code below refers to the first and the last by their position.
constexpr Launcher kLaunchers[] = {
    {"tessera-run or torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    // The size is that of srun's step: a batch script has a SLURM_PROCID and a SLURM_NTASKS too,
    // and is one process.
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};
/// torchrun's default.
constexpr int kDefaultPort = 29500;
// Slurm assigns no port: two jobs on one node rarely share the low digits of their ids.
constexpr int kSlurmFirstPort = 20000;
constexpr int kSlurmPorts = 10000;

/// nullopt for a variable that is not set; Error for one that is no integer or out of range.
std::optional<int> integer(const Variables& variables, const std::string& name, int least,
                           int most) {
  const auto text = variables(name);
  if (!text) {
    return std::nullopt;
  }
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  TESSERA_CHECK(
      error == std::errc() && end == text->data() + text->size() && value >= least && value <= most,
      "environment variable ", name, "=", *text, ": not an integer from ", least, " to ", most,
      "; correct or unset it");
  return value;
}

constexpr int kAny = std::numeric_limits<int>::max();

/// nullptr: the process was started without a launcher, and is a world of one.
const Launcher* find_launcher(const Variables& variables) {
  for (const Launcher& launcher : kLaunchers) {
    const bool rank = variables(launcher.rank).has_value();
    const bool size = variables(launcher.size).has_value();
    if (rank && size) {
      return &launcher;
    }
    TESSERA_CHECK(&launcher != &kLaunchers[0] || !(rank || size),
                  "environment variables: ", rank ? launcher.rank : launcher.size, " is set, but ",
                  rank ? launcher.size : launcher.rank,
                  " is not; set both (tessera-run and torchrun do) or neither");
  }
  return nullptr;
}

/// A local rank is optional: without one it is counted from the hosts of the ranks before this one
/// (local_rank_among() in world_from_environment.cpp).
void read_ranks(const Variables& variables, const Launcher& launcher, JobVariables& job) {
  job.launcher = detail::concat(launcher.rank, " and ", launcher.size, " of ", launcher.name);
  job.rank = *integer(variables, launcher.rank, 0, kAny);
  job.size = *integer(variables, launcher.size, 1, kAny);
  job.local_rank = integer(variables, launcher.local_rank, 0, kAny);
  job.local_size = integer(variables, launcher.local_size, 1, kAny).value_or(0);
  TESSERA_CHECK(job.rank < job.size, "environment variables: ", launcher.rank, "=", job.rank,
                " contradicts ", launcher.size, "=", job.size, "; ranks are 0 to ", job.size - 1);
  TESSERA_CHECK(!job.local_rank || *job.local_rank <= job.rank,
                "environment variables: ", launcher.local_rank, "=", job.local_rank.value_or(0),
                " contradicts ", launcher.rank, "=", job.rank,
                "; a local rank is at most the global one");
}

/// True if the launcher says that all ranks are on this host.
bool on_one_node(const Variables& variables, const Launcher& launcher, int size) {
  return integer(variables, launcher.local_size, 1, kAny) == size ||
         variables("SLURM_NNODES") == "1";
}

/// On one node no address is needed; loopback keeps the store from other hosts.
std::string read_address(const Variables& variables, const Launcher& launcher, int size) {
  if (const auto address = variables("MASTER_ADDR")) {
    return *address;
  }
  if (on_one_node(variables, launcher, size)) {
    return "127.0.0.1";
  }
  const auto slurm = variables("SLURM_LAUNCH_NODE_IPADDR");
  TESSERA_CHECK(slurm, "environment variables: ", size, " ranks from ", launcher.name,
                ", but MASTER_ADDR is not set; set it to the host of rank 0");
  return *slurm;
}

/// torchrun and tessera-run always set it. Slurm's is derived from the job, so that all its ranks
/// find the same one.
std::uint16_t read_port(const Variables& variables, const Launcher& launcher) {
  auto port = integer(variables, "MASTER_PORT", 1, std::numeric_limits<std::uint16_t>::max());
  if (!port && &launcher == &kLaunchers[2]) {
    port = kSlurmFirstPort + integer(variables, "SLURM_JOB_ID", 0, kAny).value_or(0) % kSlurmPorts;
  }
  TESSERA_CHECK(
      port || &launcher != &kLaunchers[0],
      "environment variables: RANK and WORLD_SIZE are set, but MASTER_PORT is not; set it "
      "to a free port of the host of rank 0");
  return static_cast<std::uint16_t>(port.value_or(kDefaultPort));
}

/// In seconds, fractions too. A time-out of 0 would fail at once.
std::optional<std::chrono::milliseconds> read_seconds(const Variables& variables,
                                                      const std::string& name, bool may_be_zero) {
  const auto text = variables(name);
  if (!text) {
    return std::nullopt;
  }
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  constexpr double kMost = 1e6;
  const bool in_range = (seconds > 0 || (may_be_zero && seconds == 0)) && seconds <= kMost;
  TESSERA_CHECK(*end == '\0' && in_range, "environment variable ", name, "=", *text,
                ": not a number of seconds ", may_be_zero ? "from 0" : "above 0",
                " to 1000000; correct or unset it");
  constexpr double kMillisecondsPerSecond = 1000;
  // Rounded up, so that a tiny value does not become 0.
  return std::chrono::milliseconds(std::llround(std::ceil(seconds * kMillisecondsPerSecond)));
}

/// A short time-out is set to find a hang: the report must come before it ends the job.
std::optional<std::chrono::milliseconds> half_of(
    const std::optional<std::chrono::milliseconds>& timeout) {
  constexpr std::chrono::minutes kShort{1};
  return timeout && *timeout < kShort ? std::optional(*timeout / 2) : std::nullopt;
}

}  // namespace

JobVariables read_job_variables(const Variables& variables) {
  JobVariables job;
  job.timeout = read_seconds(variables, "TESSERA_TIMEOUT", /*may_be_zero=*/false);
  job.watchdog = read_seconds(variables, "TESSERA_WATCHDOG", /*may_be_zero=*/true);
  if (!job.watchdog) {
    job.watchdog = half_of(job.timeout);
  }
  const Launcher* launcher = find_launcher(variables);
  if (launcher == nullptr) {
    return job;
  }
  read_ranks(variables, *launcher, job);
  // No rendezvous, so neither an address nor a port is required.
  if (job.size == 1) {
    return job;
  }
  job.address = read_address(variables, *launcher, job.size);
  job.port = read_port(variables, *launcher);
  // torchrun's agent then serves the store on MASTER_PORT; rank 0 must not try to bind it.
  job.agent_store = variables("TORCHELASTIC_USE_AGENT_STORE") == "True";
  job.store_fd = integer(variables, "TESSERA_STORE_FD", 0, kAny);
  // A restarted job may find the keys of its former ranks in torchrun's store.
  job.key_prefix = "tessera/" + variables("TESSERA_JOB_TOKEN").value_or("") + "/" +
                   variables("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return job;
}

std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace tessera::comm
