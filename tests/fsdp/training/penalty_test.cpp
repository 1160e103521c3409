// Penalties on sharded parameters beside a loss that is each rank's own.

#include <gtest/gtest.h>

#include "small_model.h"
#include "tessera/fsdp/fully_shard.h"
#include "testing/errors.h"

namespace tessera::fsdp {
namespace {

using testing::SmallModel;

constexpr std::int64_t kRows = 6;

/// This rank's rows of those that one rank would have; 7 features are uneven on 2 and on 3 ranks.
at::Tensor rows_of(int rank, int ranks) {
  const std::int64_t rows = kRows / ranks;
  return testing::uniform_values({kRows, 7}, 0.4).narrow(0, rank * rows, rows);
}

at::Tensor own_loss(SmallModel& model, const at::Tensor& x) {
  return model(x).square().mean();
}

at::Tensor penalty_of(const SmallModel& model) {
  return model.head->weight->square().sum() + model.blocks[0]->up->bias->abs().sum();
}

std::vector<at::Tensor> GradientsOfOneRank() {
  testing::Filled<SmallModel> alone(7, 5, 3);
  const at::Tensor loss = own_loss(alone, rows_of(0, 1));
  const at::Tensor penalty = penalty_of(alone);
  (loss + 0.5 * penalty + loss * penalty).backward();
  return testing::gradients_of(alone);
}

TEST(Penalty, OnWholeParametersHasTheGradientsOfOneRank) {
  const auto expected = GradientsOfOneRank();
  for (const int ranks : {1, 2, 3}) {
    RunOnMesh({ranks}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      testing::Filled<SmallModel> model(7, 5, 3);
      fully_shard(*model.blocks[0], mesh);
      fully_shard(model, mesh);
      const at::Tensor loss = own_loss(model, rows_of(rank.rank(), rank.size()));
      const DistributedTensor penalty(penalty_of(model));
      (loss + 0.5 * penalty.full_tensor() +
       loss * penalty.full_tensor(Placements{Partial{ReduceOp::kAvg}}))
          .backward();
      testing::expect_gradients(model, expected);
    });
  }
}

TEST(Penalty, IsRefusedBesideTheLossIfDistributed) {
  RunRanks(2, [](Rank& rank) {
    testing::Filled<SmallModel> model(7, 5, 3);
    fully_shard(model, rank.mesh({2}, {"dp"}));
    const at::Tensor loss = own_loss(model, rows_of(rank.rank(), 2));
    const at::Tensor penalty = penalty_of(model);
    EXPECT_ERROR(loss + 0.5 * penalty, "DistributedTensor(x).full_tensor()");
    EXPECT_ERROR(penalty * loss, "full_tensor(Placements{Partial{ReduceOp::kAvg}})");
    // Without a gradient its value is compared.
    EXPECT_ERROR(penalty - loss.detach(), "differs from rank 0 on ranks 1");
    EXPECT_TRUE(tessera::is_distributed(penalty - at::scalar_tensor(2)));
  });
}

}  // namespace
}  // namespace tessera::fsdp
