#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "tessera/comm/trace.h"

namespace tessera::testing {

/// Calls and bytes by mesh dimension and collective.
using Sent = std::map<std::pair<std::string, std::string>, std::pair<std::int64_t, std::int64_t>>;

inline Sent calls_and_bytes(const comm::TrafficTable& table) {
  Sent sent;
  for (const auto& [key, traffic] : table) {
    sent[key] = {traffic.calls, traffic.bytes};
  }
  return sent;
}

}  // namespace tessera::testing
