#include "rendezvous.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "tessera/core/error.h"

namespace tessera::run {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(),
                                &hints, &found);
  TESSERA_CHECK(error == 0, "the host ", host,
                " of --rdzv cannot be resolved: ", gai_strerror(error));
  return {found, &freeaddrinfo};
}

bool is_loopback(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(address.ai_addr);
    return ntohl(in->sin_addr.s_addr) >> 24 == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address.ai_addr)->sin6_addr);
}

// Debian maps a machine's own name to 127.0.1.1, where other nodes would not reach it.
bool is_own_name(const std::string& host, const addrinfo& address) {
  const bool numeric = host.find_first_not_of("0123456789.") == std::string::npos ||
                       host.find(':') != std::string::npos;
  return !numeric && host != "localhost" && is_loopback(address);
}

FileDescriptor listen_on(const addrinfo& address) {
  FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (!socket || setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(socket.get(), address.ai_addr, address.ai_addrlen) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    socket.close();
  }
  return socket;
}

int bound_port(const FileDescriptor& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    fail_errno("cannot tell the port of the store's socket");
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);
  return ntohs(address.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
}

[[noreturn]] void fail_to_bind(const Options& options) {
  const std::string where = options.host + ":" + std::to_string(options.port);
  if (errno == EADDRINUSE) {
    fail("the port of ", where, " is in use: give --rdzv another port");
  }
  if (errno == EADDRNOTAVAIL) {
    fail(options.host,
         " is not an address of this machine: --rdzv names node 0, and this is --node-rank 0");
  }
  fail_errno("cannot listen on " + where);
}

}  // namespace

Rendezvous make_rendezvous(const Options& options) {
  Rendezvous rendezvous{options.host, options.port, {}};
  if (options.node_rank != 0) {
    return rendezvous;
  }
  auto addresses = resolve(options.host, options.port, 0);
  if (is_own_name(options.host, *addresses)) {
    addresses = resolve("", options.port, AI_PASSIVE);
  }
  for (const auto* a = addresses.get(); a != nullptr && !rendezvous.listener; a = a->ai_next) {
    rendezvous.listener = listen_on(*a);
  }
  if (!rendezvous.listener) {
    fail_to_bind(options);
  }
  rendezvous.port = bound_port(rendezvous.listener);
  return rendezvous;
}

}  // namespace tessera::run
