// A step that is not finite, and which rank's rows have made it so.

#include <limits>

#include "fsdp/training/training.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"

namespace tessera::fsdp {
namespace {

const optim::NormOptions kThrow{.error_if_nonfinite = true};

/// The loss of this rank's rows, times `factor` on rank `bad`.
at::Tensor loss_with(SmallModel& model, const Rank& rank, int bad, double factor) {
  const at::Tensor loss = local_loss(model, rank);
  return rank.rank() == bad ? loss * factor : loss;
}

TEST(NonfiniteGradient, NamesTheRankAndTheParametersOnEveryRank) {
  for (const double factor :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    for (const std::vector<std::int64_t>& sizes :
         std::vector<std::vector<std::int64_t>>{{1, 3}, {2, 2}, {4, 1}}) {
      const int ranks = static_cast<int>(sizes[0] * sizes[1]);
      const auto errors = testing::ErrorsOfRanks(ranks, [&](Rank& rank) {
        testing::ShardedModel model(rank.mesh(sizes, {"replicate", "shard"}));
        loss_with(model, rank, 1, factor).backward();
        optim::clip_grad_norm_(optim::slots_of(model), 1.0, kThrow);
      });
      EXPECT_CONTAINS(errors, "rank 1 brought what is not finite to the reduction of",
                      "'block0.down.bias'", "look at the data of that rank");
    }
  }
}

TEST(NonfiniteGradient, NamesAllRanksTogether) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    testing::ShardedModel model(rank.mesh({2}, {"dp"}));
    local_loss(model, rank).mul(std::numeric_limits<double>::quiet_NaN()).backward();
    optim::grad_norm(optim::slots_of(model), kThrow);
  });
  EXPECT_CONTAINS(errors, "ranks 0, 1 brought what is not finite");
}

TEST(NonfiniteGradient, IsFoundInAnyMicroBatch) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    testing::ShardedModel model(rank.mesh({2}, {"dp"}));
    set_requires_gradient_sync(model, false);
    loss_with(model, rank, 0, std::numeric_limits<double>::quiet_NaN()).backward();
    set_requires_gradient_sync(model, true);
    local_loss(model, rank).backward();
    optim::grad_norm(optim::slots_of(model), kThrow);
  });
  EXPECT_CONTAINS(errors, "rank 0 brought what is not finite");
}

/// Where nothing small was kept, what the parts hold now has to do.
TEST(NonfiniteGradient, NamesALargeParameterAndTheRanksThatHoldIt) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    Filled<nn::Linear> large(90, 100, {.bias = false});
    fully_shard(large, rank.mesh({2}, {"dp"}));
    large(testing::uniform_values({2, 90}, 1))
        .sum()
        .mul(rank.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0)
        .backward();
    optim::grad_norm(optim::slots_of(large), kThrow);
  });
  EXPECT_CONTAINS(errors, "'weight'", "not finite on ranks 0, 1 is that of");
}

TEST(NonfiniteGradient, IsNothingWhereAllAreFinite) {
  testing::RunSharded(2, [](Rank& rank, testing::ShardedModel& model) {
    local_loss(model, rank).backward();
    EXPECT_EQ(optim::describe_nonfinite(optim::slots_of(model)), "");
  });
}

}  // namespace
}  // namespace tessera::fsdp
