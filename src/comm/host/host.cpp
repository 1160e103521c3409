#include "host/host.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <vector>

#include "host/job_variables.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// Without a look-up of names, which can block for seconds where no resolver answers. "" if it
/// fails.
std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  const int error =
      getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

/// IPv4 alone: addresses of interfaces in IPv6 are often link-local and useless without a scope.
std::string address_of_interface(const std::string& name) {
  ifaddrs* first = nullptr;
  TESSERA_CHECK(getifaddrs(&first) == 0, "listing network interfaces: ", std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(first, &freeifaddrs);
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_name == name && entry->ifa_addr != nullptr &&
        entry->ifa_addr->sa_family == AF_INET) {
      return numeric(entry->ifa_addr, sizeof(sockaddr_in));
    }
  }
  fail("GLOO_SOCKET_IFNAME=", name,
       ": this host has no such interface with an IPv4 address; "
       "`ip address` lists them");
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Empty, with getaddrinfo()'s `error`, for an unknown host.
AddressList look_up(const std::string& host, int& error) {
  addrinfo hints{};
  // The port "1" below is a placeholder: the route depends on the host alone.
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* first = nullptr;
  error = getaddrinfo(host.c_str(), "1", &hints, &first);
  return {error == 0 ? first : nullptr, &freeaddrinfo};
}

/// The address that the kernel would send from; connecting a UDP socket sends nothing.
std::string source_address_towards(const std::string& peer) {
  int error = 0;
  const AddressList list = look_up(peer, error);
  TESSERA_CHECK(error == 0, "MASTER_ADDR=", peer, ": ", gai_strerror(error),
                "; set it to the host of rank 0");
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

/// "" where the link cannot be read.
std::string link_target(const char* path) {
  std::array<char, 128> text{};
  const auto length = readlink(path, text.data(), text.size() - 1);
  return length < 0 ? "" : std::string(text.data(), static_cast<std::size_t>(length));
}

/// The fields of a stat file in /proc from the third on, the state (man 5 proc). Empty if there is
/// none.
std::vector<std::string> stat_fields(const std::string& folder) {
  std::ifstream file(folder + "/stat");
  std::string line;
  std::vector<std::string> fields;
  if (std::getline(file, line)) {
    // The second field, the program's name in brackets, may hold anything.
    std::istringstream rest(line.substr(line.rfind(')') + 1));
    for (std::string field; rest >> field;) {
      fields.push_back(field);
    }
  }
  return fields;
}

constexpr std::size_t kState = 0;
constexpr std::size_t kUserTicks = 11;
constexpr std::size_t kSystemTicks = 12;
constexpr std::size_t kStartTime = 19;

std::string folder_of(std::int64_t pid) {
  return "/proc/" + std::to_string(pid);
}

}  // namespace

/// The boot id tells hosts apart, also two with one name; the network namespace tells containers of
/// one host apart, which do not share a loopback. Shared memory needs more and checks for itself.
std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, boot);
  return boot + " " + link_target("/proc/self/ns/net");
}

std::string routable_address(const std::string& peer) {
  // The variable that Gloo itself reads; of a list the first is taken.
  if (const auto interface = environment_variable("GLOO_SOCKET_IFNAME")) {
    return address_of_interface(interface->substr(0, interface->find(',')));
  }
  std::string address = source_address_towards(peer);
  // Reported here, on the host that is set up wrongly: its peers would only see a time-out.
  TESSERA_CHECK(!address.empty() && !is_loopback(address) && address != "::1",
                "the ranks are on several hosts, but this host has only the address '", address,
                "' towards MASTER_ADDR=", peer, "; set GLOO_SOCKET_IFNAME to the interface to use");
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

/// For rank 0 under a launcher that hands over no socket. The descriptor goes to the store, which
/// closes it.
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
    // close() may change errno.
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

/// The start time tells it from a later process with the same pid. A zombie has ended: its parent
/// has merely not looked yet.
bool is_alive(const ProcessIdentity& process) {
  const auto fields = stat_fields(folder_of(process.pid));
  return fields.size() > kStartTime && std::stoull(fields[kStartTime]) == process.start_time &&
         fields[kState] != "Z" && fields[kState] != "X";
}

std::optional<ThreadStatus> thread_status(std::int64_t pid, std::int64_t thread) {
  const auto fields = stat_fields(folder_of(pid) + "/task/" + std::to_string(thread));
  if (fields.size() <= kStartTime) {
    return std::nullopt;
  }
  return ThreadStatus{fields[kState].front(),
                      std::stoull(fields[kUserTicks]) + std::stoull(fields[kSystemTicks])};
}

}  // namespace tessera::comm
