// With TESSERA_DEBUG=1 ranks compare the parameters of each unit before its first gather.

#include <optional>

#include "fsdp/training/training.h"
#include "testing/environment.h"

namespace tessera::fsdp {
namespace {

using testing::DebugChecks;
using testing::ErrorsOfRanks;

void expect_error_everywhere(const std::vector<std::string>& errors, const std::string& part) {
  EXPECT_CONTAINS(errors, part, "make the same model");
}

// Over two ranks 3 and 4 rows have shards of one padded size.
TEST(ParameterAgreement, NamesTheParameterThatDiffers) {
  const DebugChecks checks("1");
  const auto errors = ErrorsOfRanks(2, [](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, rank.rank() == 0 ? 3 : 4);
    testing::shard(model, rank.mesh({2}, {"dp"}));
    testing::local_loss(model, rank).backward();
  });
  expect_error_everywhere(errors, "the root unit: ");
  EXPECT_CONTAINS(errors[0], "on rank 0 it is 'head.weight' of sizes [3, 7]");
  EXPECT_CONTAINS(errors[1], "on rank 1 it is 'head.weight' of sizes [4, 7]");
}

TEST(ParameterAgreement, ComparesTheNumberOfParameters) {
  const DebugChecks checks("1");
  const auto errors = ErrorsOfRanks(3, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 3, {.bias = rank.rank() != 1});
    fully_shard(linear, rank.mesh({3}, {"dp"}));
    linear(testing::uniform_values({2, 3}, 1));
  });
  expect_error_everywhere(errors, "rank 0 has 2 parameters, rank 1 has 1");
}

// Only ranks 0 and 1 share the experts in which one differs; all of the unit's end.
TEST(ParameterAgreement, TellsTheRanksOfTheOtherMeshes) {
  const DebugChecks checks("1");
  const auto errors = ErrorsOfRanks(4, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"ep", "edp"});
    Filled<SmallModel> model(kDim, kHidden, rank.rank() == 1 ? 3 : 4);
    fully_shard(*model.head, mesh.flatten("dp"),
                {.parameter_mesh = [&](auto&, auto&) { return std::optional(mesh["edp"]); }});
    testing::shard(model, mesh["dp"]);
    testing::local_loss(model, rank).backward();
  });
  expect_error_everywhere(errors, "unit 'head': ");
}

TEST(ParameterAgreement, IsTrueOfEqualModels) {
  const DebugChecks checks("1");
  const std::vector<at::Tensor> expected = testing::gradients_alone();
  RunRanks(4, [&](Rank& rank) {
    testing::ShardedModel model(rank.mesh({2, 2}, {"replicate", "shard"}));
    testing::local_loss(model, rank).backward();
    testing::expect_gradients(model, expected);
  });
}

}  // namespace
}  // namespace tessera::fsdp
