#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/comm/world.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::testing {

class Rank {
 public:
  explicit Rank(comm::WorldPtr world) : world_(std::move(world)) {}

  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  const comm::WorldPtr& world() const { return world_; }
  DeviceMesh mesh(std::vector<std::int64_t> sizes, std::vector<std::string> names) const {
    return init_device_mesh(world_, std::move(sizes), std::move(names));
  }

 private:
  comm::WorldPtr world_;
};

using Body = std::function<void(Rank&)>;

struct RanksOptions {
  comm::WorldOptions world{.timeout = std::chrono::seconds(30)};
  /// The time limit for all ranks. At the limit, prints each rank's current collective and aborts.
  std::chrono::seconds deadline{60};
  std::function<std::vector<comm::WorldPtr>(int size, const comm::WorldOptions&)> make_worlds =
      comm::thread_worlds;
};

inline int ranks_of(const std::vector<std::int64_t>& mesh_sizes) {
  std::int64_t ranks = 1;
  for (const std::int64_t size : mesh_sizes) {
    ranks *= size;
  }
  return static_cast<int>(ranks);
}

/// Runs `body` on `size` threads, each of which is a rank. If a rank fails, other ranks get
/// PeerErrors. Rethrows the first error, preferably one that is not a PeerError.
void RunRanks(int size, const Body& body, const RanksOptions& options = {});

/// Like RunRanks(). `body` also gets a mesh with the given sizes and names.
void RunOnMesh(const std::vector<std::int64_t>& sizes, const std::vector<std::string>& names,
               const std::function<void(Rank&, const DeviceMesh&)>& body);
void RunOnMesh(const std::vector<std::int64_t>& sizes, const std::vector<std::string>& names,
               const std::function<void(const DeviceMesh&)>& body);

/// Like RunRanks(), but returns the error message of each rank; "" for no error.
std::vector<std::string> ErrorsOfRanks(int size, const Body& body,
                                       const RanksOptions& options = {});

/// Counts a rank's collectives, and the bytes that the rank sends, since construction.
class Sent {
 public:
  explicit Sent(const Rank& rank) : world_(rank.world()), before_(world_->traffic().table()) {}

  comm::TrafficTable table() const { return world_->traffic().since(before_); }
  comm::Traffic of(const std::string& group, const std::string& collective) const {
    const comm::TrafficTable traffic = table();
    const auto found = traffic.find({group, collective});
    return found == traffic.end() ? comm::Traffic{} : found->second;
  }
  std::int64_t calls(const std::string& group, const std::string& collective) const {
    return of(group, collective).calls;
  }
  std::int64_t calls() const { return comm::total(table()).calls; }

 private:
  comm::WorldPtr world_;
  comm::TrafficTable before_;
};

}  // namespace tessera::testing

namespace tessera {
using testing::Rank;
using testing::RunOnMesh;
using testing::RunRanks;
using testing::Sent;
}  // namespace tessera

// Tests whose body runs on every rank: TEST_ON_RANKS(Suite, Name, 2) { ... rank ... },
// TEST_ON_MESH(Suite, Name, {2, 2}, {"dp", "tp"}) { ... rank, mesh ... }.

#define TEST_ON_RANKS(suite, name, ...)                                    \
  static void suite##_##name##_on_ranks(::tessera::testing::Rank& rank);   \
  TEST(suite, name) {                                                      \
    ::tessera::testing::RunRanks(__VA_ARGS__, &suite##_##name##_on_ranks); \
  }                                                                        \
  static void suite##_##name##_on_ranks([[maybe_unused]] ::tessera::testing::Rank& rank)

#define TEST_ON_MESH(suite, name, ...)                                                  \
  static void suite##_##name##_on_mesh(::tessera::testing::Rank& rank,                  \
                                       const ::tessera::DeviceMesh& mesh);              \
  TEST(suite, name) {                                                                   \
    ::tessera::testing::RunOnMesh(__VA_ARGS__, &suite##_##name##_on_mesh);              \
  }                                                                                     \
  static void suite##_##name##_on_mesh([[maybe_unused]] ::tessera::testing::Rank& rank, \
                                       [[maybe_unused]] const ::tessera::DeviceMesh& mesh)
