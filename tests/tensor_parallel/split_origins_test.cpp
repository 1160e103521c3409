// Parts of a split parameter that come from other tensors: the ranks made the model with different
// seeds, or values.

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {
namespace split_origins {

constexpr auto kDifferent = "are parts of different tensors; give all ranks one seed";

at::Tensor call(nn::Linear& linear) {
  return linear(testing::uniform_values({3, 4}, 1));
}

void split(nn::Linear& linear, const DeviceMesh& mesh) {
  parallelize_module(linear, mesh, {{"", colwise_parallel()}});
}

TEST(SplitOrigins, AreRefusedForDifferentSeedsBeforeThePlan) {
  RunRanks(3, [](Rank& rank) {
    nn::Linear linear(4, 5);
    nn::init_weights(linear, rank.rank() == 2 ? 1 : 0);
    split(linear, rank.mesh({3}, {"tp"}));
    EXPECT_ERROR(call(linear), "tensor parallelism on", "parameter 'weight' on rank 0 and rank 2",
                 kDifferent);
  });
}

TEST(SplitOrigins, AreRefusedForDifferentSeedsAfterThePlan) {
  RunRanks(2, [](Rank& rank) {
    const auto linear = testing::made_on_meta<nn::Linear>(4, 5);
    split(*linear, rank.mesh({2}, {"tp"}));
    nn::to_empty(*linear, at::kCPU);
    nn::init_weights(*linear, static_cast<std::uint64_t>(rank.rank()));
    EXPECT_ERROR(call(*linear), kDifferent);
  });
}

TEST(SplitOrigins, AreRefusedForOtherValuesUnderFsdpToo) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    testing::Filled<nn::Linear> linear(4, 5);
    if (mesh.local_rank("tp") == 1) {
      const at::NoGradGuard no_grad;
      linear.slot("weight")->get().add_(1);
    }
    split(linear, mesh["tp"]);
    fsdp::fully_shard(linear, mesh["dp"]);
    EXPECT_ERROR(call(linear), kDifferent);
  });
}

TEST(SplitOrigins, AreOfEquallyManyParameters) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    testing::Filled<nn::Linear> linear(4, 5, nn::LinearOptions{.bias = rank.rank() == 1});
    split(linear, rank.mesh({2}, {"tp"}));
    call(linear);
  });
  EXPECT_CONTAINS(errors, "of DeviceMesh((tp=2), cpu), rank 1 has 2 parameters where rank 0 has 1",
                  "make the same model on every rank");
  EXPECT_CONTAINS(errors[0], "(on this rank from parameter 'weight' to parameter 'weight')");
  EXPECT_CONTAINS(errors[1], "(on this rank from parameter 'weight' to parameter 'bias')");
}

TEST(SplitOrigins, AreAcceptedForOneTensor) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    for (const bool sharded : {false, true}) {
      for (const std::int64_t outputs : {5, 1}) {
        nn::Linear filled(4, outputs), seeded(4, outputs);
        testing::fill(filled);
        nn::init_weights(seeded, 3);
        for (nn::Linear* linear : {&filled, &seeded}) {
          split(*linear, mesh["tp"]);
          if (sharded) {
            fsdp::fully_shard(*linear, mesh["dp"]);
          }
          EXPECT_NO_THROW(call(*linear).sum().backward());
        }
      }
    }
  });
}

TEST(SplitOrigins, DoNotMatterOnceValuesWereWrittenOrWhereTheyAreMeantToDiffer) {
  RunOnMesh({2}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    nn::Linear written(4, 5), distinct(4, 5);
    for (nn::Linear* linear : {&written, &distinct}) {
      nn::init_weights(*linear, static_cast<std::uint64_t>(rank.rank()));
      split(*linear, mesh);
    }
    {
      const at::NoGradGuard no_grad;
      for (const auto& [name, slot] : written.named_slots()) {
        slot->get().fill_(0.5);
      }
    }
    for (const auto& [name, slot] : distinct.named_slots()) {
      slot->set_distinct_along(mesh);
    }
    EXPECT_NO_THROW(call(written));
    EXPECT_NO_THROW(call(distinct));
  });
}

}  // namespace split_origins
}  // namespace
}  // namespace tessera::tensor_parallel
