// The plan of a model of libtorch's modules predicts what a run of the model sends.

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "planning/sent.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/planning/plan.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/models.h"
#include "testing/ranks.h"

namespace tessera {
namespace {

using Encoder = nn::Adopted<torch::nn::TransformerEncoderImpl>;

/// A sharded encoder whose MLPs are split.
std::shared_ptr<Encoder> make_encoder(const DeviceMesh& mesh) {
  auto encoder = [] {
    const nn::MetaDevice meta;
    return nn::adopt(testing::torch_encoder());
  }();
  using tensor_parallel::colwise_parallel, tensor_parallel::rowwise_parallel;
  tensor_parallel::parallelize_module(
      *encoder, mesh["tp"],
      {{"layers.*.linear1", colwise_parallel()}, {"layers.*.linear2", rowwise_parallel()}});
  fsdp::fully_shard(*encoder, mesh["dp"]);
  return encoder;
}

void train_encoder(Encoder& encoder, optim::Optimizer& optimizer, const DeviceMesh&) {
  encoder(at::full({3, 4, 8}, 0.1)).square().mean().backward();
  optim::clip_grad_norm_(optimizer.parameters(), 1.0);
  optimizer.step();
  optimizer.zero_grad();
}

TEST(Plan, SendsWhatARunOfAnAdoptedEncoderSends) {
  const MeshShape shape({2, 2}, {"dp", "tp"});
  const planning::RunPlan plan = planning::plan(make_encoder, train_encoder, shape);
  RunRanks(4, [&](Rank& rank) {
    const DeviceMesh mesh = init_device_mesh(rank.world(), shape.sizes(), shape.names());
    const std::shared_ptr<Encoder> encoder = make_encoder(mesh);
    nn::to_empty(*encoder, at::kCPU);
    nn::init_weights(*encoder, /*seed=*/0);
    optim::AdamW optimizer(*encoder, optim::AdamWOptions{});
    train_encoder(*encoder, optimizer, mesh);
    const comm::TrafficTable before = rank.world()->traffic().table();
    train_encoder(*encoder, optimizer, mesh);
    const testing::Sent sent = testing::calls_and_bytes(rank.world()->traffic().since(before));
    EXPECT_EQ(sent.count({"dp", "all_gather"}), 1U);
    EXPECT_EQ(sent.count({"tp", "all_reduce"}), 1U);
    for (const planning::RankPlan& planned : plan.ranks) {
      if (planned.kind.first == rank.rank()) {
        EXPECT_EQ(testing::calls_and_bytes(planned.metrics.comm), sent);
      }
    }
  });
}

}  // namespace
}  // namespace tessera
