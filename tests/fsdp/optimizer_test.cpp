// Tests optimizers that are created before fully_shard(), and training in fp16 with a GradScaler.

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdp/training/training.h"
#include "optim/local_shards.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::fsdp::optimizers {

using optim::OptimizerList;

constexpr std::int64_t kFewRows = 8;

using OptimizerPtr = std::shared_ptr<optim::Optimizer>;
using MakeOptimizer = std::function<OptimizerPtr(const nn::ModuleBase& model)>;

OptimizerPtr adamw(const nn::ModuleBase& model) {
  return std::make_shared<optim::AdamW>(model, optim::AdamWOptions{.lr = 0.01});
}

OptimizerPtr sgd(const nn::ModuleBase& model) {
  return std::make_shared<optim::Sgd>(
      model, optim::SgdOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true});
}

OptimizerPtr muon(const nn::ModuleBase& model) {
  const optim::MuonSplit split = optim::split_for_muon(model, {"head.weight"});
  const optim::MuonOptions options{.lr = 0.01, .compute_dtype = c10::ScalarType::Float};
  return std::make_shared<OptimizerList>(std::vector<OptimizerPtr>{
      std::make_shared<optim::Muon>(split.matrices, options),
      std::make_shared<optim::AdamW>(split.rest, optim::AdamWOptions{.lr = 0.01})});
}

std::vector<at::Tensor> train(SmallModel& model, optim::Optimizer& optimizer, std::int64_t part,
                              std::int64_t parts) {
  for (int step = 0; step < 3; ++step) {
    const std::int64_t rows = kFewRows / parts;
    fsdp::loss_of(model, uniform_values({kFewRows, 6}, 50 + step), part * rows, rows).backward();
    optim::clip_grad_norm_(optimizer.parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : parameters_of(model)) {
    parameters.push_back(full_tensor(parameter));
  }
  return parameters;
}

TEST(OptimizerMadeBeforeSharding, TrainsLikeOneRank) {
  struct Case {
    std::vector<std::string> names;
    std::string
        parts;  ///< the mesh dimension whose ranks have parts of the batch; "" for all ranks
  };
  for (const Case& c :
       {Case{{"one", "dp"}, ""}, Case{{"replicate", "shard"}, ""}, Case{{"dp", "tp"}, "dp"}}) {
    const std::int64_t first = c.names[0] == "one" ? 1 : 2;
    RunOnMesh({first, 4 / first}, c.names, [&](Rank& rank, const DeviceMesh& mesh) {
      for (const auto make : {adamw, sgd, muon}) {
        Filled<SmallModel> reference(6, 10, 3, 2), model(6, 10, 3, 2);
        const OptimizerPtr expected = make(reference), optimizer = make(model);
        if (c.parts.empty()) {
          shard(model, first == 1 ? mesh["dp"] : mesh);
        } else {
          using namespace tensor_parallel;
          parallelize_module(
              model, mesh["tp"],
              {{"block*.up", colwise_parallel()}, {"block*.down", rowwise_parallel()}});
          shard(model, mesh["dp"]);
        }
        EXPECT_EACH(c.parts.empty() ? train(model, *optimizer, rank.rank(), 4)
                                    : train(model, *optimizer, mesh.local_rank(c.parts), 2),
                    train(reference, *expected, 0, 1), 1e-4, 1e-5);
      }
    });
  }
}

// Shard sizes are multiples of 64 bytes. The parameters, gradients and optimizer states of a unit
// are therefore adjacent in memory, without padding.
TEST_ON_RANKS(FullyShard, PlacesTheTensorsOfAUnitContiguously, 2) {
  Filled<SmallModel> model(32, 64, 32, 2);
  optim::Sgd optimizer(model, {.momentum = 0.9});
  shard(model, rank.mesh({2}, {"dp"}));
  fsdp::loss_of(model, uniform_values({kFewRows, 32}, 1), 0, kFewRows).backward();
  std::vector<at::Tensor> parameters, gradients, states;
  for (const optim::StateTensor& state : optimizer.state()) {
    parameters.push_back(local_tensor(state.slot->persistent()));
    gradients.push_back(local_tensor(state.slot->persistent().grad()));
    states.push_back(local_tensor(state.tensor));
  }
  EXPECT_GT(parameters.size(), 3U);
  EXPECT_EQ(optim::merge_adjoining(parameters).size(), 3U);
  EXPECT_EQ(optim::merge_adjoining(gradients).size(), 3U);
  EXPECT_EQ(optim::merge_adjoining(states).size(), 1U);
}

TEST(StockOptimizer, IsRefusedAfterShardingReplacedItsParameters) {
  const torch::optim::SGDOptions options(0.1);
  RunRanks(2, [&](Rank& rank) {
    Filled<SmallModel> model(6, 10, 3, 1), planned(6, 10, 3, 1);
    torch::optim::AdamW adamw(model.parameters(), torch::optim::AdamWOptions(0.1));
    torch::optim::SGD sgd(model.parameters(), options), cleared(model.parameters(), options);
    shard(model, rank.mesh({2}, {"dp"}));
    fsdp::loss_of(model, uniform_values({kFewRows, 6}, 1), 0, kFewRows).backward();
    EXPECT_ERROR(cleared.zero_grad(), "fully_shard or replicate has replaced");
    EXPECT_ERROR(adamw.step(), "fully_shard or replicate has replaced");
    EXPECT_ERROR(sgd.step(), "fully_shard or replicate has replaced");
    torch::optim::SGD of_planned(planned.blocks[0]->up->parameters(), options);
    tensor_parallel::parallelize_module(planned, rank.mesh({2}, {"tp"}),
                                        {{"block*.up", tensor_parallel::colwise_parallel()}});
    EXPECT_ERROR(of_planned.step(), "parallelize_module has replaced");
  });
  const auto model = testing::made_on_meta<SmallModel>(6, 10, 3, 1);
  torch::optim::SGD optimizer(model->parameters(), options);
  nn::to_empty(*model, at::kCPU);
  EXPECT_ERROR(optimizer.step(), "nn::to_empty has replaced");
}

/// Returns the loss times 1e-6, so that the gradients underflow in fp16.
at::Tensor tiny_loss(SmallModel& model, const at::Tensor& batch) {
  return model(batch).to(at::kFloat).square().mean() * 1e-6;
}

at::Tensor part_of_batch(int step, std::int64_t part, std::int64_t parts, c10::ScalarType dtype) {
  const std::int64_t rows = kFewRows / parts;
  return uniform_values({kFewRows, 6}, 50 + step).narrow(0, part * rows, rows).to(dtype);
}

constexpr int kSteps = 4;

/// Returns the parameters after training on one rank, in fp32, without loss scaling.
std::vector<at::Tensor> reference_parameters() {
  Filled<SmallModel> model(6, 10, 3, 2);
  optim::AdamW optimizer(model, {.lr = 0.01, .eps = 1e-15});
  for (int step = 0; step < kSteps; ++step) {
    tiny_loss(model, part_of_batch(step, 0, 1, at::kFloat)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return parameters_of(model);
}

// Trains a model with fp32 parameters that FSDP gathers in fp16, and a model with fp16 parameters.
TEST(LossScaling, TrainsInFp16LikeFp32) {
  const std::vector<at::Tensor> expected = reference_parameters();
  for (const bool memory_efficient : {false, true}) {
    RunOnMesh({2, 2}, {"replicate", "shard"}, [&](Rank& rank, const DeviceMesh& mesh) {
      Filled<SmallModel> model(6, 10, 3, 2);
      if (memory_efficient) {
        model.to(at::kHalf);
        shard(model, mesh.flatten(), {.mp_policy = {.reduce_dtype = at::kFloat}});
      } else {
        shard(model, mesh, {.mp_policy = {.param_dtype = at::kHalf, .reduce_dtype = at::kFloat}});
      }
      optim::GradScaler scaler({.init_scale = memory_efficient ? 131072.0 : 65536.0});
      optim::AdamW optimizer(model, {.lr = 0.01, .eps = 1e-15});
      for (int step = 0; step < kSteps; ++step) {
        scaler.scale(tiny_loss(model, part_of_batch(step, rank.rank(), 4, at::kHalf))).backward();
        const at::Tensor norm = scaler.clip_grad_norm_(optimizer.parameters(), 1e9);
        EXPECT_GT(norm.item<double>(), 0.0);
        EXPECT_LT(norm.item<double>(), 1e-4);
        EXPECT_TRUE(scaler.step(optimizer));
        optimizer.zero_grad();
      }
      std::size_t i = 0;
      for (const at::Tensor& parameter : parameters_of(model)) {
        EXPECT_EQ(parameter.scalar_type(), memory_efficient ? at::kHalf : at::kFloat);
        const at::Tensor difference = full_tensor(parameter).to(at::kFloat) - expected[i++];
        EXPECT_LT(difference.abs().mean().item<double>(), memory_efficient ? 2e-3 : 1e-3) << i;
      }
    });
  }
}

}  // namespace tessera::fsdp::optimizers
