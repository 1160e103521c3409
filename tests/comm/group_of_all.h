#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include <numeric>

#include "rendezvous/store_world.h"
#include "tessera/comm/world.h"
#include "testing/environment.h"
#include "testing/errors.h"
#include "testing/ranks.h"

namespace tessera::comm {

/// Returns the process group "all", which has all ranks of the world in ascending order.
inline CommunicatorPtr group_of_all(World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.group(ranks, "all");
}

/// Options of RunRanks() for simulated hosts: letter i of `letters` names the host of rank i.
inline testing::RanksOptions on_hosts(const std::string& letters) {
  return {.make_worlds = [letters](int size, const WorldOptions& options) {
    std::vector<std::string> hosts;
    for (const char letter : letters.substr(0, static_cast<std::size_t>(size))) {
      hosts.emplace_back(1, letter);
    }
    return thread_worlds_on(hosts, options);
  }};
}

/// Calls RunRanks() with a rank for each letter. Ranks with equal letters are on the same host.
inline void run_on_hosts(const std::string& letters, const testing::Body& body) {
  testing::RunRanks(static_cast<int>(letters.size()), body, on_hosts(letters));
}

/// A communication back end, and the simulated host of each rank.
struct BackendCase {
  const char* backend;
  std::string hosts;  ///< letter i names the host of rank i

  std::string name() const { return backend + ("_" + hosts); }
};

class OnBackend : public ::testing::TestWithParam<BackendCase> {
 protected:
  const testing::SharedMemory shared_memory_{std::string(GetParam().backend) != "gloo"};

  static void run(const testing::Body& body) { run_on_hosts(GetParam().hosts, body); }
};

/// Returns the message of the Error that `call` throws, or "". Does not catch a PeerError.
template <class Call>
std::string own_error_of(const Call& call) {
  try {
    call();
  } catch (const PeerError&) {
    throw;
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// Returns values that identify the sending rank: element i is 1000 * sender + i.
inline at::Tensor numbers_from(std::int64_t sender, std::int64_t count) {
  return at::arange(count, at::kLong).add(1000 * sender).to(at::kFloat);
}

}  // namespace tessera::comm
