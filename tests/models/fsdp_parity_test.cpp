// A Llama under every kind of FSDP, alone and with everything that it combines with, against the
// same Llama on one rank: losses, gradients, gradient norms and final weights.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "models/llama_run.h"
#include "tessera/models/parallelize.h"
#include "testing/ranks.h"

namespace tessera::models {
namespace {

using testing::Rank;
using testing::RunRanks;

/// How parameters are split over the data-parallel ranks.
struct Sharding {
  const char* name;
  std::int64_t replicas, dp;
  bool reshard_after_forward = true;
  std::int64_t post_forward_mesh_size = 1;
};

/// Further options that it is combined with.
struct Extra {
  const char* name;
  std::int64_t tp = 1;
  std::int64_t accumulate = 1;
  ActivationMemory activations = ActivationMemory::kAll;
  bool offload = false;
};

using Case = std::tuple<Sharding, Extra>;

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name;
}

DeviceMesh mesh_of(Rank& rank, const Sharding& sharding, const Extra& extra) {
  if (sharding.replicas == 1) {
    return rank.mesh({sharding.dp, extra.tp}, {"dp", "tp"});
  }
  return rank.mesh({sharding.replicas, sharding.dp, extra.tp}, {"dp_replicate", "dp", "tp"});
}

ParallelOptions options_of(const Sharding& sharding, const Extra& extra) {
  ParallelOptions options{.fsdp = {.reshard_after_forward = sharding.reshard_after_forward,
                                   .post_forward_mesh_size = sharding.post_forward_mesh_size},
                          .activations = extra.activations};
  if (extra.offload) {
    options.fsdp.offload_policy.emplace();
  }
  return options;
}

class FsdpParity : public ::testing::TestWithParam<Case> {};

TEST_P(FsdpParity, TrainsAsOneRankDoes) {
  const Sharding sharding = std::get<0>(GetParam());
  const Extra extra = std::get<1>(GetParam());
  const Outcome expected = train_alone(kOddShape);
  const std::int64_t parts = sharding.replicas * sharding.dp;
  RunRanks(static_cast<int>(parts * extra.tp), [&](Rank& rank) {
    const DeviceMesh mesh = mesh_of(rank, sharding, extra);
    const auto model = make_llama(kOddShape);
    parallelize(*model, mesh, options_of(sharding, extra));
    const DeviceMesh data = data_mesh(mesh).flatten();
    const StrictScope strict;
    const Outcome outcome = train(*model, kOddShape,
                                  {.part = data.local_rank(),
                                   .parts = parts,
                                   .accumulate = extra.accumulate,
                                   .reduce_each = sharding.reshard_after_forward});
    expect_near(outcome, expected, data);
  });
}

// Neither 60 rows nor 37 nor 61 divide by any of these, nor do 30 of a tensor-parallel half.
constexpr Sharding kZero2{"Zero2", 1, 4, false};
constexpr Sharding kZero3{"Zero3", 1, 4};
constexpr Sharding kNeighbours{"Hpz", 1, 4, true, 2};
constexpr Sharding kHybrid{"Hsdp", 2, 3};
constexpr Sharding kHybridZero2{"HsdpZero2", 2, 3, false};

constexpr Extra kExtras[] = {
    {.name = "plain"},
    {.name = "tp", .tp = 2},
    {.name = "ac", .activations = ActivationMemory::kInputs},
    {.name = "offload", .offload = true},
    {.name = "accumulation", .accumulate = 2},
    {.name = "tp_ac", .tp = 2, .activations = ActivationMemory::kInputs},
    {.name = "all",
     .tp = 2,
     .accumulate = 2,
     .activations = ActivationMemory::kMatmuls,
     .offload = true},
};

INSTANTIATE_TEST_SUITE_P(All, FsdpParity,
                         ::testing::Combine(::testing::Values(kZero2, kZero3, kNeighbours, kHybrid,
                                                              kHybridZero2),
                                            ::testing::ValuesIn(kExtras)),
                         name_of);

}  // namespace
}  // namespace tessera::models
