// Copies of parameters on several ranks are equal: before the first forward always, with
// TESSERA_DEBUG=1 after each backward, too, and so are their gradients.

#include <optional>

#include "fsdp/training/training.h"
#include "testing/environment.h"

namespace tessera::fsdp {
namespace {

using testing::DebugChecks;
using testing::ErrorsOfRanks;
using testing::kClasses;
using testing::kDim;
using testing::kHidden;
using testing::SmallModel;

/// As ranks have them that were seeded each with its own number.
void fill_differently(SmallModel& model, const Rank& rank) {
  testing::fill(model);
  if (rank.rank() > 0) {
    model.head->weight->detach()[1][2] = rank.rank();
  }
}

/// With debug checks, where rank 1 adds 1 to what `part` returns of head.weight after a first step.
std::vector<std::string> errors_of_second_step(at::Tensor (*part)(const at::Tensor& weight)) {
  const DebugChecks checks("1");
  return ErrorsOfRanks(2, [&](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    replicate(model, rank.mesh({2}, {"dp"}));
    testing::local_loss(model, rank).backward();
    local_tensor(part(model.head->slot("weight")->persistent())).add_(rank.rank());
    testing::local_loss(model, rank).backward();
  });
}

TEST(CopyAgreement, ComparesReplicasInTheFirstForward) {
  const auto errors = ErrorsOfRanks(3, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    fill_differently(model, rank);
    replicate(model, rank.mesh({3}, {"dp"}));
    testing::local_loss(model, rank);
  });
  EXPECT_CONTAINS(errors, "the root unit: parameter 'head.weight' differs from rank 0",
                  "on ranks 1, 2, first at [1, 2]", "and 1 on rank 1",
                  "give all ranks the same values");
}

TEST(CopyAgreement, FailsUntilTheyAreEqual) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    fill_differently(model, rank);
    replicate(model, rank.mesh({2}, {"dp"}));
    EXPECT_ERROR(testing::local_loss(model, rank), "'head.weight' differs");
    EXPECT_ERROR(testing::local_loss(model, rank), "'head.weight' differs");
    testing::fill(model);
    testing::local_loss(model, rank).backward();
  });
}

TEST(CopyAgreement, ComparesTheReplicasOfShards) {
  const auto errors = ErrorsOfRanks(4, [](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    if (rank.rank() == 3) {
      model.head->bias->detach()[2] = 5;  // rank 3 has the third, of two replicas' shards
    }
    testing::shard(model, rank.mesh({2, 2}, {"replicate", "shard"}));
    testing::local_loss(model, rank);
  });
  EXPECT_CONTAINS(errors[1], "parameter 'head.bias' differs from rank 1 on ranks 3, first at [0]");
  EXPECT_CONTAINS(errors[3], "and 5 on rank 3");
}

TEST(CopyAgreement, ComparesReplicatedParameters) {
  const auto errors = ErrorsOfRanks(2, [](Rank& rank) {
    SmallModel model(kDim, kHidden, kClasses);
    fill_differently(model, rank);
    testing::shard(model, rank.mesh({2}, {"dp"}), {.shard_placement = [](auto&, auto&) {
                     return std::optional(Placement(Replicate{}));
                   }});
    testing::local_loss(model, rank);
  });
  EXPECT_CONTAINS(errors[0], "parameter 'head.weight' differs from rank 0 on ranks 1");
}

TEST(CopyAgreement, IsRepeatedWithDebugChecks) {
  const auto errors = errors_of_second_step([](const at::Tensor& weight) { return weight; });
  EXPECT_CONTAINS(errors[0], "parameter 'head.weight' differs from rank 0 on ranks 1");
}

TEST(CopyAgreement, ComparesGradientsWithDebugChecks) {
  // The gradient that an accumulation on one rank alone has left.
  const auto errors = errors_of_second_step([](const at::Tensor& weight) { return weight.grad(); });
  EXPECT_CONTAINS(errors[1],
                  "the gradient of parameter 'head.weight' differs from rank 0 on ranks 1");
}

}  // namespace
}  // namespace tessera::fsdp
