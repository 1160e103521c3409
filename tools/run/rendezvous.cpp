#include "rendezvous.h"

#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <thread>
#include <utility>

#include "command_line/devices.h"
#include "tessera/core/error.h"

namespace tessera::run {
namespace {

int look_up(const std::string& host, int port, int flags, addrinfo*& found) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  return getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints,
                     &found);
}

// Throws Error for an unknown host. An empty one with AI_PASSIVE stands for every interface.
AddressList resolve(const std::string& host, int port, int flags) {
  addrinfo* found = nullptr;
  const int error = look_up(host, port, flags, found);
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

// Debian maps a machine's own name to 127.0.1.1, where other nodes would not reach it. Such a name
// gets a socket on every interface instead.
bool is_own_name(const std::string& host, const addrinfo& address) {
  const bool numeric = host.find_first_not_of("0123456789.") == std::string::npos ||
                       host.find(':') != std::string::npos;
  return !numeric && host != "localhost" && is_loopback(address);
}

// Holds nothing where a call failed; errno then says why. SO_REUSEADDR: connections that the last
// job on this port has left do not keep the next one from starting.
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

// The system has chosen the port where the command line gave none.
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

// As a map, so that what is set for a rank replaces what the launcher itself was given.
std::map<std::string, std::string> own_environment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) {
      variables[text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  return variables;
}

}  // namespace

std::string why_unknown(const std::string& host) {
  addrinfo* found = nullptr;
  const int error = look_up(host, 0, 0, found);
  if (error == 0) {
    freeaddrinfo(found);
  }
  return error == EAI_NONAME || error == EAI_AGAIN ? gai_strerror(error) : "";
}

void wait_for_host(const Options& options) {
  if (options.node_rank != 0 || why_unknown(options.host).empty()) {
    return;
  }
  const double limit = options.timeout.empty() ? 60 : std::min(60.0, std::stod(options.timeout));
  std::cerr << "tessera-run: waits for the host " << options.host << " of --rdzv to be known, "
            << limit << " s at most\n";
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit);
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  } while (!why_unknown(options.host).empty() && std::chrono::steady_clock::now() < end);
}

AddressList find_addresses(const Options& options) {
  return resolve(options.host, options.port, 0);
}

void fail_to_listen(const Options& options) {
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

FileDescriptor try_listen(const Options& options) {
  auto addresses = find_addresses(options);
  if (is_own_name(options.host, *addresses)) {
    addresses = resolve("", options.port, AI_PASSIVE);
  }
  // A host may have several addresses, IPv6 and IPv4; the first that can be bound is taken. Not the
  // one behind a port in use: others would reach who has that.
  for (const auto* a = addresses.get(); a != nullptr; a = a->ai_next) {
    FileDescriptor listener = listen_on(*a);
    if (listener || errno == EADDRINUSE) {
      return listener;
    }
  }
  return {};
}

Rendezvous make_rendezvous(const Options& options, FileDescriptor listener) {
  Rendezvous rendezvous{options.host, options.port, std::move(listener)};
  if (options.node_rank != 0) {
    return rendezvous;
  }
  if (!rendezvous.listener) {
    rendezvous.listener = try_listen(options);
  }
  if (!rendezvous.listener) {
    fail_to_listen(options);
  }
  rendezvous.port = bound_port(rendezvous.listener);
  return rendezvous;
}

std::string job_token(const Options& options) {
  // A token from outside can be given to the launchers of several nodes alike.
  const char* given = std::getenv("TESSERA_JOB_TOKEN");
  if (given != nullptr || options.place_is_shared) {
    // No rank of an earlier start is taken for one of this.
    const std::string start = options.round > 0 ? "." + std::to_string(options.round) : "";
    return (given != nullptr ? given : options.job_id) + start;
  }
  std::array<std::uint8_t, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    fail_errno("cannot get random bytes");
  }
  std::string token;
  for (const auto byte : bytes) {
    token += "0123456789abcdef"[byte >> 4];
    token += "0123456789abcdef"[byte & 15];
  }
  return token;
}

std::vector<std::string> rank_environment(const Options& options, const Rendezvous& rendezvous,
                                          const std::string& token, const std::string& run_dir,
                                          int local_rank) {
  auto variables = own_environment();
  const int rank = options.first_rank() + local_rank;
  variables["RANK"] = std::to_string(rank);
  variables["LOCAL_RANK"] = std::to_string(local_rank);
  variables["WORLD_SIZE"] = std::to_string(options.world_size());
  variables["LOCAL_WORLD_SIZE"] = std::to_string(options.nproc);
  variables["MASTER_ADDR"] = rendezvous.host;
  variables["MASTER_PORT"] = std::to_string(rendezvous.port);
  // Without it every rank would start a thread for each core.
  if (auto& threads = variables["OMP_NUM_THREADS"]; threads.empty()) {
    threads = std::to_string(std::max(1, usable_cores() / options.nproc));
  }
  if (!token.empty()) {
    variables["TESSERA_JOB_TOKEN"] = token;
  }
  variables["TESSERA_RUN_DIR"] = run_dir;
  for (const auto& [name, value] : {std::pair("TESSERA_TIMEOUT", options.timeout),
                                    std::pair("TESSERA_WATCHDOG", options.watchdog)}) {
    if (!value.empty()) {
      variables[name] = value;
    }
  }
  // What the launcher itself inherited as a rank names a descriptor which its ranks do not have,
  // and a store of torchrun's that is not this job's.
  for (const char* name :
       {"TESSERA_STORE_FD", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"}) {
    variables.erase(name);
  }
  if (rank == 0) {
    variables["TESSERA_STORE_FD"] = std::to_string(rendezvous.listener.get());
  }
  std::vector<std::string> environment;
  for (const auto& [name, value] : variables) {
    environment.push_back(name + "=" + value);
  }
  return environment;
}

}  // namespace tessera::run
