// Optimizers made before their module was sharded, and gradients scaled for fp16.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <string>

#include "optim/local_shards.h"
#include "small_model.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/muon.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/errors.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace {

using optim::OptimizerList;
using testing::full_tensor;
using testing::SmallModel;

constexpr std::int64_t kRows = 8;

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

/// Three steps on the rank's part of a batch; the parameters at the end.
std::vector<at::Tensor> train(SmallModel& model, optim::Optimizer& optimizer, std::int64_t part,
                              std::int64_t parts) {
  for (int step = 0; step < 3; ++step) {
    const at::Tensor batch = testing::uniform_values({kRows, 6}, 50 + step);
    const std::int64_t rows = kRows / parts;
    testing::loss_of(model, batch, part * rows, rows).backward();
    optim::clip_grad_norm_(optimizer.parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<at::Tensor> parameters;
  for (const auto& [name, slot] : model.named_slots()) {
    parameters.push_back(full_tensor(slot->persistent()));
  }
  return parameters;
}

void shard(SmallModel& model, const DeviceMesh& mesh, const Options& options = {}) {
  for (const auto& block : model.blocks) {
    fully_shard(*block, mesh, options);
  }
  fully_shard(model, mesh, options);
}

/// An optimizer made first must train as one process does.
void expect_follows(const MakeOptimizer& make, std::int64_t part, std::int64_t parts,
                    const std::function<void(SmallModel&)>& split) {
  SmallModel reference(6, 10, 3, 2), model(6, 10, 3, 2);
  testing::fill(reference);
  testing::fill(model);
  const OptimizerPtr expected = make(reference);
  const OptimizerPtr optimizer = make(model);
  split(model);
  const auto wanted = train(reference, *expected, 0, 1);
  const auto got = train(model, *optimizer, part, parts);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(got[i].allclose(wanted[i], 1e-4, 1e-5)) << i;
  }
}

TEST(OptimizerMadeFirst, FollowsFullyShard) {
  RunOnMesh({4}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    for (const auto make : {adamw, sgd, muon}) {
      expect_follows(make, rank.rank(), 4, [&](SmallModel& model) { shard(model, mesh); });
    }
  });
}

TEST(OptimizerMadeFirst, FollowsHsdp) {
  RunOnMesh({2, 2}, {"replicate", "shard"}, [](Rank& rank, const DeviceMesh& mesh) {
    for (const auto make : {adamw, sgd, muon}) {
      expect_follows(make, rank.rank(), 4, [&](SmallModel& model) { shard(model, mesh); });
    }
  });
}

TEST(OptimizerMadeFirst, FollowsTensorParallelismAndFullyShard) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    for (const auto make : {adamw, sgd, muon}) {
      expect_follows(make, mesh.local_rank("dp"), 2, [&](SmallModel& model) {
        using namespace tensor_parallel;
        parallelize_module(
            model, mesh["tp"],
            {{"block*.up", colwise_parallel()}, {"block*.down", rowwise_parallel()}});
        shard(model, mesh["dp"]);
      });
    }
  });
}

// Three units of even shards of multiples of 64 bytes: parameters, gradients and state are three
// runs of memory each.
TEST(FullyShard, LaysOutWhatAnOptimizerUpdatesAsOnePerUnit) {
  RunRanks(2, [](Rank& rank) {
    testing::Filled<SmallModel> model(32, 64, 32, 2);
    optim::Sgd optimizer(model, {.momentum = 0.9});
    shard(model, rank.mesh({2}, {"dp"}));
    testing::loss_of(model, testing::uniform_values({kRows, 32}, 1), 0, kRows).backward();
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
  });
}

TEST(StockOptimizerMadeFirst, IsRefusedAtStepAndAtZeroGrad) {
  RunRanks(2, [](Rank& rank) {
    testing::Filled<SmallModel> model(6, 10, 3, 1);
    torch::optim::AdamW adamw(model.parameters(), torch::optim::AdamWOptions(0.1));
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1));
    torch::optim::SGD cleared(model.parameters(), torch::optim::SGDOptions(0.1));
    shard(model, rank.mesh({2}, {"dp"}));
    testing::loss_of(model, testing::uniform_values({kRows, 6}, 1), 0, kRows).backward();
    const std::string reason = "that fully_shard has replaced since; make torch::optim";
    EXPECT_ERROR(cleared.zero_grad(), reason);
    EXPECT_ERROR(adamw.step(), reason);
    EXPECT_ERROR(sgd.step(), reason);
  });
}

TEST(StockOptimizerMadeFirst, IsRefusedAfterParallelizeModuleAndToEmpty) {
  RunRanks(2, [](Rank& rank) {
    testing::Filled<SmallModel> model(6, 10, 3, 1);
    torch::optim::SGD optimizer(model.blocks[0]->up->parameters(), torch::optim::SGDOptions(0.1));
    tensor_parallel::parallelize_module(model, rank.mesh({2}, {"tp"}),
                                        {{"block*.up", tensor_parallel::colwise_parallel()}});
    EXPECT_ERROR(optimizer.step(), "parallelize_module has replaced");
  });
  const auto model = testing::made_on_meta<SmallModel>(6, 10, 3, 1);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  nn::to_empty(*model, at::kCPU);
  EXPECT_ERROR(optimizer.step(), "nn::to_empty has replaced");
}

TEST(StockOptimizer, MadeAfterFullyShardWorks) {
  RunRanks(2, [](Rank& rank) {
    SmallModel reference(6, 10, 3, 1), model(6, 10, 3, 1);
    testing::fill(reference);
    testing::fill(model);
    shard(model, rank.mesh({2}, {"dp"}));
    torch::optim::AdamW expected(reference.parameters(), torch::optim::AdamWOptions(0.01));
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
    const at::Tensor batch = testing::uniform_values({kRows, 6}, 1);
    testing::loss_of(reference, batch, 0, kRows).backward();
    testing::loss_of(model, batch, 4 * rank.rank(), 4).backward();
    expected.step();
    optimizer.step();
    EXPECT_TRUE(full_tensor(model.head->slot("weight")->persistent())
                    .allclose(reference.head->weight->detach(), 1e-4, 1e-5));
  });
}

}  // namespace
}  // namespace tessera::fsdp
