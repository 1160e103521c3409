#include "job_variables.h"

#include <charconv>
#include <cstdlib>
#include <limits>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// The variables of one kind of launcher.
struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

constexpr Launcher kLaunchers[] = {
    {"tessera-run or torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};
constexpr int kDefaultPort = 29500;
// Slurm has no port of its own: two jobs on one node rarely share the low digits of their ids.
constexpr int kSlurmFirstPort = 20000;
constexpr int kSlurmPorts = 10000;

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

const Launcher* find_launcher(const Variables& variables) {
  for (const Launcher& launcher : kLaunchers) {
    const bool rank = variables(launcher.rank).has_value();
    const bool size = variables(launcher.size).has_value();
    // SLURM_NTASKS alone is there in every shell of an allocation.
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

void read_ranks(const Variables& variables, const Launcher& launcher, JobVariables& job) {
  job.rank = *integer(variables, launcher.rank, 0, kAny);
  job.size = *integer(variables, launcher.size, 1, kAny);
  job.local_rank = integer(variables, launcher.local_rank, 0, kAny);
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

std::optional<std::chrono::milliseconds> read_timeout(const Variables& variables) {
  const auto text = variables("TESSERA_TIMEOUT_S");
  if (!text) {
    return std::nullopt;
  }
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  constexpr double kMost = 1e6;
  TESSERA_CHECK(*end == '\0' && seconds > 0 && seconds <= kMost,
                "environment variable TESSERA_TIMEOUT_S=", *text,
                ": not a number of seconds above 0; correct or unset it");
  constexpr double kMillisecondsPerSecond = 1000;
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * kMillisecondsPerSecond) + 1);
}

}  // namespace

JobVariables read_job_variables(const Variables& variables) {
  JobVariables job;
  job.timeout = read_timeout(variables);
  const Launcher* launcher = find_launcher(variables);
  if (launcher == nullptr) {
    return job;
  }
  read_ranks(variables, *launcher, job);
  if (job.size == 1) {
    return job;
  }
  job.address = read_address(variables, *launcher, job.size);
  job.port = read_port(variables, *launcher);
  job.agent_store = variables("TORCHELASTIC_USE_AGENT_STORE") == "True";
  job.store_fd = integer(variables, "TESSERA_STORE_FD", 0, kAny);
  job.key_prefix = "tessera/" + variables("TESSERA_JOB_TOKEN").value_or("") + "/" +
                   variables("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return job;
}

std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace tessera::comm
