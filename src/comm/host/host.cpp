// Reads the environment variables of launchers (tessera-run, torchrun, Slurm, Open MPI). A function
// supplies the values, so that tests need not change the environment.

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <thread>
#include <vector>

#include "host/host.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// The names of the environment variables of a launcher. `name`: the launcher's name, for messages.
/// `local_size`: the variable with the number of ranks on this machine.
struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

/// Launchers in order of precedence: tessera-run and torchrun can themselves run under Slurm or
/// Open MPI. Do not reorder: functions refer to tessera-run and Slurm by index.
constexpr Launcher kLaunchers[] = {
    {"tessera-run or torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    // srun sets SLURM_STEP_NUM_TASKS only for its tasks. SLURM_PROCID and SLURM_NTASKS are also set
    // in a batch script, which is not a rank.
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};
/// The port of rank 0's store if MASTER_PORT is not set; equal to torchrun's default.
constexpr int kDefaultPort = 29500;
// Slurm assigns no port, so the port of rank 0's store depends on the job id. Jobs on one machine
// rarely have the same last four digits.
constexpr int kSlurmFirstPort = 20000;
constexpr int kSlurmPorts = 10000;

/// Returns the integer value of an environment variable; nullopt if the variable is not set. Throws
/// Error if the value is not an integer or is out of range.
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
      "environment variable ", name, "=", *text, " is not an integer from ", least, " to ", most,
      "; correct or unset the variable");
  return value;
}

constexpr int kAny = std::numeric_limits<int>::max();

/// Returns the launcher that started this process; nullptr if there is no launcher. The job then
/// has one rank.
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

/// Reads this process's rank, world size and local rank. A local rank that the launcher does not
/// set is computed later, by local_rank_among() in world_from_environment.cpp.
void read_ranks(const Variables& variables, const Launcher& launcher, JobVariables& job) {
  job.launcher = detail::concat(launcher.rank, " and ", launcher.size, " of ", launcher.name);
  job.rank = *integer(variables, launcher.rank, 0, kAny);
  job.size = *integer(variables, launcher.size, 1, kAny);
  job.local_rank = integer(variables, launcher.local_rank, 0, kAny);
  TESSERA_CHECK(job.rank < job.size, "environment variables: ", launcher.rank, "=", job.rank,
                " contradicts ", launcher.size, "=", job.size, "; ranks are 0 to ", job.size - 1);
  TESSERA_CHECK(!job.local_rank || *job.local_rank <= job.rank,
                "environment variables: ", launcher.local_rank, "=", job.local_rank.value_or(0),
                " contradicts ", launcher.rank, "=", job.rank,
                "; a local rank is at most the global rank");
}

/// Whether the launcher says that all ranks are on this machine.
bool on_one_node(const Variables& variables, const Launcher& launcher, int size) {
  return integer(variables, launcher.local_size, 1, kAny) == size ||
         variables("SLURM_NNODES") == "1";
}

/// Returns the address of rank 0's store. The launcher must set an address if ranks are on several
/// machines.
std::string read_address(const Variables& variables, const Launcher& launcher, int size) {
  if (const auto address = variables("MASTER_ADDR")) {
    return *address;
  }
  if (on_one_node(variables, launcher, size)) {
    return "127.0.0.1";
  }
  const auto slurm = variables("SLURM_LAUNCH_NODE_IPADDR");
  TESSERA_CHECK(slurm, "environment variables: ", launcher.name, " starts ", size,
                " ranks, but MASTER_ADDR is not set; set MASTER_ADDR to the host of rank 0");
  return *slurm;
}

/// Returns the port of rank 0's store. torchrun and tessera-run set the port. Under Slurm, all
/// ranks compute the same port from the job id.
std::uint16_t read_port(const Variables& variables, const Launcher& launcher) {
  auto port = integer(variables, "MASTER_PORT", 1, std::numeric_limits<std::uint16_t>::max());
  if (!port && &launcher == &kLaunchers[2]) {
    port = kSlurmFirstPort + integer(variables, "SLURM_JOB_ID", 0, kAny).value_or(0) % kSlurmPorts;
  }
  TESSERA_CHECK(port || &launcher != &kLaunchers[0],
                "environment variables: RANK and WORLD_SIZE are set, but MASTER_PORT is not; set "
                "MASTER_PORT to a free port of the host of rank 0");
  return static_cast<std::uint16_t>(port.value_or(kDefaultPort));
}

/// Reads a duration in seconds, with or without a fraction. Zero is an error unless `may_be_zero`
/// is true, because a time-out of 0 would fail at once.
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
                " is not a number of seconds ", may_be_zero ? "from 0" : "above 0",
                " to 1000000; correct or unset the variable");
  constexpr double kMillisecondsPerSecond = 1000;
  // The duration is rounded up to milliseconds, so that a very small value does not become 0.
  return std::chrono::milliseconds(std::llround(std::ceil(seconds * kMillisecondsPerSecond)));
}

/// Returns the default of TESSERA_WATCHDOG, the time after which a waiting rank prints a line. A
/// time-out below a minute gives half of the time-out; otherwise nullopt.
std::optional<std::chrono::milliseconds> half_of(
    const std::optional<std::chrono::milliseconds>& timeout) {
  constexpr std::chrono::minutes kShort{1};
  return timeout && *timeout < kShort ? std::optional(*timeout / 2) : std::nullopt;
}

}  // namespace

void read_time_limits(const Variables& variables, JobVariables& job) {
  job.timeout = read_seconds(variables, "TESSERA_TIMEOUT", /*may_be_zero=*/false);
  job.watchdog = read_seconds(variables, "TESSERA_WATCHDOG", /*may_be_zero=*/true);
  if (!job.watchdog) {
    job.watchdog = half_of(job.timeout);
  }
}

JobVariables read_job_variables(const Variables& variables) {
  JobVariables job;
  read_time_limits(variables, job);
  const Launcher* launcher = find_launcher(variables);
  if (launcher == nullptr) {
    return job;
  }
  read_ranks(variables, *launcher, job);
  // A single rank connects to no other rank, so neither an address nor a port is required.
  if (job.size == 1) {
    return job;
  }
  job.address = read_address(variables, *launcher, job.size);
  job.port = read_port(variables, *launcher);
  // With TORCHELASTIC_USE_AGENT_STORE=True, torchrun's agent serves the store on MASTER_PORT, and
  // rank 0 must not bind the port.
  job.agent_store = variables("TORCHELASTIC_USE_AGENT_STORE") == "True";
  job.store_fd = integer(variables, "TESSERA_STORE_FD", 0, kAny);
  // The prefix of all keys contains the restart count, because after a restart torchrun's store can
  // still contain keys of the previous start.
  job.key_prefix = "tessera/" + variables("TESSERA_JOB_TOKEN").value_or("") + "/" +
                   variables("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return job;
}

std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
}

namespace {

/// Converts an address to its numeric form; "" on failure. Does not look up names, because a
/// look-up can block for seconds if no name server answers.
std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  const int error =
      getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

/// Returns the IPv4 address of a network interface. IPv6 addresses are not used: they are often
/// link-local and then need a scope id.
std::string address_of_interface(const std::string& name) {
  ifaddrs* first = nullptr;
  TESSERA_CHECK(getifaddrs(&first) == 0,
                "cannot list the network interfaces: ", std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(first, &freeifaddrs);
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_name == name && entry->ifa_addr != nullptr &&
        entry->ifa_addr->sa_family == AF_INET) {
      return numeric(entry->ifa_addr, sizeof(sockaddr_in));
    }
  }
  fail("GLOO_SOCKET_IFNAME=", name,
       ": this host has no interface of this name with an IPv4 address; "
       "`ip address` lists the interfaces");
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Returns the addresses of a host name. If the name is unknown, returns no address and sets
/// `error` to the error of getaddrinfo().
AddressList look_up(const std::string& host, int& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* first = nullptr;
  error = getaddrinfo(host.c_str(), "1", &hints, &first);
  return {error == 0 ? first : nullptr, &freeaddrinfo};
}

/// Asks the kernel, through a UDP socket, which local address is used to send to `peer`.
std::string source_address_towards(const std::string& peer) {
  int error = 0;
  const AddressList list = look_up(peer, error);
  TESSERA_CHECK(error == 0, "cannot find rank 0's host ", peer, ": ", gai_strerror(error),
                "; set MASTER_ADDR to the host of rank 0, or GLOO_SOCKET_IFNAME to an interface");
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    const int fd = socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    const bool found = fd >= 0 && connect(fd, entry->ai_addr, entry->ai_addrlen) == 0 &&
                       getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0;
    if (fd >= 0) {
      close(fd);
    }
    if (found) {
      return numeric(reinterpret_cast<const sockaddr*>(&own), length);
    }
  }
  return "";
}

std::string link_target(const char* path) {
  std::array<char, 128> text{};
  const auto length = readlink(path, text.data(), text.size() - 1);
  return length < 0 ? "" : std::string(text.data(), static_cast<std::size_t>(length));
}

/// Reads the fields of /proc/PID/stat from the third field (the process state) on, as described in
/// man 5 proc. Returns an empty list if the file does not exist.
std::vector<std::string> stat_fields(const std::string& folder) {
  std::ifstream file(folder + "/stat");
  std::string line;
  std::vector<std::string> fields;
  if (std::getline(file, line)) {
    // Field 2, the program's name in brackets, is skipped, because the name can contain any
    // characters.
    std::istringstream rest(line.substr(line.rfind(')') + 1));
    for (std::string field; rest >> field;) {
      fields.push_back(field);
    }
  }
  return fields;
}

constexpr std::size_t kState = 0;
constexpr std::size_t kStartTime = 19;

std::string folder_of(std::int64_t pid) {
  return "/proc/" + std::to_string(pid);
}

}  // namespace

/// Machines have different boot ids. Containers on one machine have different network namespaces
/// and no common loopback interface. make_shm_communicator() checks further requirements of shared
/// memory.
std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, boot);
  return boot + " " + link_target("/proc/self/ns/net");
}

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string routable_address(const std::string& peer) {
  // GLOO_SOCKET_IFNAME is a list of interfaces, as for Gloo. Only the first interface is used.
  if (const auto interface = environment_variable("GLOO_SOCKET_IFNAME")) {
    return address_of_interface(interface->substr(0, interface->find(',')));
  }
  std::string address = source_address_towards(peer);
  // The misconfigured machine must throw the error: ranks on other machines would only time out.
  TESSERA_CHECK(!address.empty() && !is_loopback(address) && address != "::1",
                "the ranks are on several hosts, but this host has only the address '", address,
                "' towards rank 0's host ", peer,
                "; set GLOO_SOCKET_IFNAME to an interface that the other hosts can reach");
  return address;
}

std::string why_unknown(const std::string& host) {
  int error = 0;
  look_up(host, error);
  return error == 0 ? "" : gai_strerror(error);
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address.starts_with("127.");
}

/// Opens a listening socket for rank 0's store if the launcher passes no socket. The store becomes
/// the owner of the file descriptor.
int listen_on_loopback(std::uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool listening =
      fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
      bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      listen(fd, SOMAXCONN) == 0;
  if (!listening) {
    // errno is saved, because close() can change errno.
    const int error = errno;
    close(fd);
    fail("rank 0 cannot listen on MASTER_PORT=", port, ": ", std::strerror(error),
         "; choose a free port, or let tessera-run choose one");
  }
  return fd;
}

ProcessIdentity this_process() {
  const std::int64_t pid = getpid();
  const auto fields = stat_fields(folder_of(pid));
  return {pid, fields.size() > kStartTime ? std::stoull(fields[kStartTime]) : 0};
}

/// A later process with the same pid has another start time. A zombie (a process that has ended but
/// was not reaped by its parent) is not alive.
bool is_alive(const ProcessIdentity& process) {
  const auto fields = stat_fields(folder_of(process.pid));
  return fields.size() > kStartTime && std::stoull(fields[kStartTime]) == process.start_time &&
         fields[kState] != "Z" && fields[kState] != "X";
}

void wait_for_first_failure() {
  if (environment_variable("TESSERA_JOB_TOKEN")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
}

}  // namespace tessera::comm
