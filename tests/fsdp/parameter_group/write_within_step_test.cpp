// A write to shards within a step, between the gathers that use pieces kept from an earlier one.
#include <ATen/ops/eye.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>

#include "fsdp/parameter_group/over_replicas.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/fsdp/parameter_copy.h"
#include "tessera/optim/adamw.h"
#include "testing/files.h"

namespace tessera::fsdp {
namespace {

using testing::full_tensor;
using testing::halve;
using testing::hybrid_mesh;
using testing::kOverReplicas;
using testing::local_loss;
using testing::ShardedModel;
using testing::SmallModel;
using Path = std::filesystem::path;

/// Halves all parameters of a sharded model, in one way or another.
struct Write {
  const char* name;
  std::function<void(SmallModel& model, Rank& rank, const Path& folder)> act;
};

void PrintTo(const Write& write, std::ostream* out) {
  *out << write.name;
}

void halve_in_place(SmallModel& model, Rank&, const Path&) {
  halve(model);
}

void halve_as_distributed(SmallModel& model, Rank&, const Path&) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, slot] : model.named_slots()) {
    slot->persistent().mul_(0.5);
  }
}

void copy_halved(SmallModel& model, Rank& rank, const Path&) {
  ShardedModel other(hybrid_mesh(rank, 2, 2), kOverReplicas);
  halve(other);
  copy_parameters(other, model);
}

void load_halved(SmallModel& model, Rank& rank, const Path& folder) {
  ShardedModel other(hybrid_mesh(rank, 2, 2));
  halve(other);
  checkpoint::save_hugging_face(other, *rank.world(), folder, "{}");
  checkpoint::load_hugging_face(model, folder);
}

void convert_and_halve(SmallModel& model, Rank&, const Path&) {
  model.to(at::kDouble);
  halve(model);
  model.to(at::kFloat);
}

class WriteWithinAStep : public ::testing::TestWithParam<Write> {};

TEST_P(WriteWithinAStep, IsSeen) {
  testing::Filled<SmallModel> alone(testing::kDim, testing::kHidden, testing::kClasses);
  halve(alone);
  const at::Tensor x = testing::batch(testing::kDim, 1);
  const at::Tensor expected = alone(x);
  const testing::TemporaryFolder folder;
  RunRanks(4, [&](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, 2, 2), kOverReplicas);
    set_is_last_backward(model, false);
    local_loss(model, rank).backward();
    GetParam().act(model, rank, folder.path());
    const c10::AutoGradMode no_grad(false);
    EXPECT_TRUE(model(x).allclose(expected, 1e-5, 1e-6));
    halve(model);
    const UnshardScope scope(model);
    EXPECT_TRUE(model.head->weight->allclose(alone.head->weight->mul(0.5), 1e-5, 1e-6));
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, WriteWithinAStep,
                         ::testing::Values(Write{"InPlace", halve_in_place},
                                           Write{"AsDistributed", halve_as_distributed},
                                           Write{"Copy", copy_halved}, Write{"Load", load_halved},
                                           Write{"Conversion", convert_and_halve}),
                         [](const auto& info) { return std::string(info.param.name); });

// The others' shards have not changed, or are empty.
TEST(ShardsOverReplicas, SeeAWriteOfOneRank) {
  RunRanks(4, [](Rank& rank) {
    nn::Linear linear(3, 3, {.bias = false});
    testing::fill(linear);
    fully_shard(linear, hybrid_mesh(rank, 2, 2), kOverReplicas);
    set_is_last_backward(linear, false);
    const at::Tensor x = at::eye(3);
    linear(x).sum().backward();
    const c10::AutoGradMode no_grad(false);
    if (rank.rank() == 1) {
      local_tensor(linear.slot("weight")->persistent()).fill_(7);
    }
    EXPECT_TRUE(linear(x).select(1, 1).equal(at::full({3}, 7.0)));
  });
}

// One tensor, which AdamW updates where it is.
TEST(ShardsOverReplicas, SeeAnOptimizerThatStepsBetweenMicroBatches) {
  RunRanks(4, [](Rank& rank) {
    nn::Linear linear(3, 5, {.bias = false});
    testing::fill(linear);
    fully_shard(linear, hybrid_mesh(rank, 2, 2), kOverReplicas);
    optim::AdamW optimizer(linear, {.lr = 0.1});
    set_requires_all_reduce(linear, false);
    linear(at::eye(3)).sum().backward();
    optimizer.step();
    EXPECT_TRUE(linear(at::eye(3)).t().equal(full_tensor(linear.slot("weight")->persistent())));
  });
}

TEST(ShardsOverReplicas, SeeAWriteAfterAForwardWithoutBackward) {
  RunRanks(4, [](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, 2, 2), kOverReplicas);
    testing::Filled<SmallModel> alone(testing::kDim, testing::kHidden, testing::kClasses);
    const at::Tensor x = testing::batch(testing::kDim, 0);
    for (const bool last : {true, false, true}) {
      set_is_last_backward(model, last);
      for (const bool grad : {false, true}) {
        const c10::AutoGradMode mode(grad);
        EXPECT_TRUE(model(x).allclose(alone(x), 1e-4, 1e-5)) << last << grad;
        halve(model);
        halve(alone);
      }
    }
  });
}

TEST(ShardsOverReplicas, SeeAWriteAfterAUnitWasCalledByItself) {
  RunRanks(4, [](Rank& rank) {
    ShardedModel model(hybrid_mesh(rank, 2, 2), kOverReplicas);
    testing::Filled<SmallModel> alone(testing::kDim, testing::kHidden, testing::kClasses);
    const at::Tensor x = testing::batch(testing::kDim, 0);
    model(x).sum().backward();  // knows its root from now on
    const at::Tensor unused = (*model.blocks[0])(x);
    halve(model);
    halve(alone);
    EXPECT_TRUE(model(x).allclose(alone(x), 1e-4, 1e-5));
  });
}

}  // namespace
}  // namespace tessera::fsdp
