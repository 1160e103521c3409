#pragma once

#include <cstdint>
#include <string>

namespace tessera::comm {

/// Equal for two processes that reach each other over loopback: boot id and network namespace.
std::string host_identity();

/// The numeric address by which other hosts reach this one: of the interface GLOO_SOCKET_IFNAME, or
/// of the one that routes to `peer`. Throws Error if there is none but loopback.
std::string routable_address(const std::string& peer);

/// True for "localhost" and 127.0.0.0/8.
bool is_loopback(const std::string& address);

/// A TCP socket bound to 127.0.0.1:`port`, listening. Throws Error if the port is in use.
int listen_on_loopback(std::uint16_t port);

}  // namespace tessera::comm
