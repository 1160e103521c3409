#include "host.h"

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

#include "job_variables.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  const int error =
      getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

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

/// The address that the kernel would send from; connecting a UDP socket sends nothing.
std::string source_address_towards(const std::string& peer) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* first = nullptr;
  const int error = getaddrinfo(peer.c_str(), "1", &hints, &first);
  TESSERA_CHECK(error == 0, "MASTER_ADDR=", peer, ": ", gai_strerror(error),
                "; set it to the host of rank 0");
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(first, &freeaddrinfo);
  for (const addrinfo* entry = first; entry != nullptr; entry = entry->ai_next) {
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

}  // namespace

std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, boot);
  return boot + " " + link_target("/proc/self/ns/net");
}

std::string routable_address(const std::string& peer) {
  if (const auto interface = environment_variable("GLOO_SOCKET_IFNAME")) {
    return address_of_interface(interface->substr(0, interface->find(',')));
  }
  std::string address = source_address_towards(peer);
  TESSERA_CHECK(!address.empty() && !is_loopback(address) && address != "::1",
                "the ranks are on several hosts, but this host has only the address '", address,
                "' towards MASTER_ADDR=", peer, "; set GLOO_SOCKET_IFNAME to the interface to use");
  return address;
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address.starts_with("127.");
}

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
    const int error = errno;
    close(fd);
    fail("rank 0 cannot listen on MASTER_PORT=", port, ": ", std::strerror(error),
         "; choose a free port, or let tessera-run choose one");
  }
  return fd;
}

}  // namespace tessera::comm
