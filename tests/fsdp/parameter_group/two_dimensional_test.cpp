// FSDP over tensor and sequence parallelism.
#include <gtest/gtest.h>

#include <functional>

#include "fsdp/training/small_model.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "testing/small_llama.h"

namespace tessera::fsdp {
namespace {

using testing::full_tensor;
using testing::SmallLlama;
using testing::SmallLlamaConfig;

constexpr std::int64_t kTokens = 12;

struct Tokens {
  at::Tensor inputs, targets;
};

Tokens tokens_of(int step, std::int64_t vocabulary) {
  const at::Tensor ids =
      at::arange(kTokens + 1, at::kLong).mul(5).add(3 * step).remainder(vocabulary);
  return {ids.narrow(0, 0, kTokens), ids.narrow(0, 1, kTokens)};
}

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<at::Tensor> gradients;  ///< after the first backward
  std::vector<at::Tensor> parameters;
};

/// Three steps of AdamW. `part`: which of `parts` equal parts of the tokens is this rank's.
Outcome train(SmallLlama& model, const SmallLlamaConfig& config, std::int64_t part,
              std::int64_t parts) {
  Outcome outcome;
  optim::AdamW optimizer(model, {.lr = 0.01});
  std::vector<nn::SlotPtr> slots;
  for (const auto& [name, slot] : model.named_slots()) {
    slots.push_back(slot);
  }
  for (int step = 0; step < 3; ++step) {
    const Tokens tokens = tokens_of(step, config.vocabulary);
    const std::int64_t count = kTokens / parts;
    const at::Tensor loss =
        tensor_parallel::cross_entropy(model(tokens.inputs.narrow(0, part * count, count)),
                                       tokens.targets.narrow(0, part * count, count));
    loss.backward();
    outcome.losses.push_back(loss.item<double>());
    if (step == 0) {
      for (const nn::SlotPtr& slot : slots) {
        outcome.gradients.push_back(full_tensor(slot->persistent().grad()).clone());
      }
    }
    outcome.norms.push_back(optim::clip_grad_norm_(slots, 0.5).item<double>());
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const nn::SlotPtr& slot : slots) {
    outcome.parameters.push_back(full_tensor(slot->persistent()));
  }
  return outcome;
}

void expect_tensors(const SmallLlama& model, const Outcome& outcome, const Outcome& expected) {
  const auto slots = model.named_slots();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    EXPECT_TRUE(outcome.gradients[i].allclose(expected.gradients[i], 1e-4, 1e-6)) << slots[i].first;
    EXPECT_TRUE(outcome.parameters[i].allclose(expected.parameters[i], 1e-3, 1e-4))
        << slots[i].first;
  }
}

struct Case {
  std::int64_t dp, tp;
  bool sequence_parallel;
  SmallLlamaConfig config;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.dp << "x" << c.tp << (c.sequence_parallel ? " sp" : "")
       << (c.config.bias ? " bias" : "");
}

void build(SmallLlama& model, const DeviceMesh& mesh, bool sequence_parallel,
           const Options& options = {}) {
  testing::fill(model);
  if (mesh.size("tp") > 1) {
    tensor_parallel::parallelize_module(model, mesh["tp"],
                                        testing::plan_of_small_llama(sequence_parallel));
  }
  for (const auto& block : model.blocks) {
    fully_shard(*block, mesh["dp"], options);
  }
  fully_shard(model, mesh["dp"], options);
}

class TwoDimensional : public ::testing::TestWithParam<Case> {};

TEST_P(TwoDimensional, TrainsAsOneRankDoes) {
  const Case c = GetParam();
  testing::Filled<SmallLlama> alone(c.config);
  const Outcome expected = train(alone, c.config, 0, 1);
  RunRanks(static_cast<int>(c.dp * c.tp), [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({c.dp, c.tp}, {"dp", "tp"});
    SmallLlama model(c.config);
    build(model, mesh, c.sequence_parallel);
    const StrictScope strict;
    const Outcome outcome = train(model, c.config, mesh.local_rank("dp"), c.dp);
    for (std::size_t step = 0; step < expected.losses.size(); ++step) {
      const at::Tensor loss = at::full({1}, outcome.losses[step], at::kDouble);
      if (c.dp > 1) {
        mesh.group("dp").all_reduce(loss, ReduceOp::kSum)->wait();
      }
      EXPECT_NEAR(loss.item<double>() / static_cast<double>(c.dp), expected.losses[step], 1e-5);
      EXPECT_NEAR(outcome.norms[step], expected.norms[step], 1e-5);
    }
    expect_tensors(model, outcome, expected);
  });
}

constexpr SmallLlamaConfig kEven{.vocabulary = 16, .dim = 8, .inner = 16, .hidden = 8};
constexpr SmallLlamaConfig kUneven{};
constexpr SmallLlamaConfig kBias{.bias = true};

INSTANTIATE_TEST_SUITE_P(Meshes, TwoDimensional,
                         ::testing::Values(Case{1, 1, true, kUneven}, Case{2, 2, true, kEven},
                                           Case{2, 2, true, kUneven}, Case{2, 2, false, kUneven},
                                           Case{1, 4, true, kUneven}, Case{1, 3, true, kBias},
                                           Case{4, 1, true, kUneven}, Case{3, 2, true, kBias},
                                           Case{2, 3, false, kBias}));

TEST(TwoDimensional, SplitsColumnsByTpFirst) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    SmallLlama model;
    build(model, mesh, true);
    const at::Tensor& q = model.blocks[0]->mixer->q->slot("weight")->persistent();
    EXPECT_EQ(DistributedTensor(q).placements(), (Placements{StridedShard{0, 2}, Shard{0}}));
    const at::Tensor& o = model.blocks[0]->mixer->o->slot("weight")->persistent();
    EXPECT_EQ(DistributedTensor(o).placements(), (Placements{Shard{0}, Shard{1}}));
    const at::Tensor& norm = model.norm->slot("weight")->persistent();
    EXPECT_EQ(DistributedTensor(norm).placements(), (Placements{Shard{0}, Replicate{}}));
  });
}

TEST(TwoDimensional, SumsNormGradientsOverTpOnce) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    SmallLlama model;
    build(model, mesh, true);
    const Tokens tokens = tokens_of(0, 13);
    const comm::TrafficTable before = rank.world()->traffic().table();
    tensor_parallel::cross_entropy(model(tokens.inputs), tokens.targets).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    // Two in the loss, and one for the five norms' gradients: their shards over dp.
    const comm::Traffic sums = traffic.at({"tp", "all_reduce"});
    EXPECT_EQ(sums.calls, 3);
    EXPECT_EQ(sums.bytes, 4 * (kTokens + 2 * kTokens + 5 * 8 / 2));
    EXPECT_EQ(traffic.at({"dp", "all_gather"}).calls, 2 * 2 + 1);
    EXPECT_EQ(traffic.at({"dp", "reduce_scatter"}).calls, 3);
  });
}

/// Gradients of an MLP of one hidden feature, which the first rank of tensor parallelism has.
std::vector<at::Tensor> gradients_of_one_feature(const DeviceMesh* mesh, const Options& options) {
  testing::Filled<testing::GatedMlp> mlp({.hidden = 1});
  if (mesh != nullptr) {
    tensor_parallel::parallelize_module(mlp, (*mesh)["tp"],
                                        {{"gate", tensor_parallel::colwise_parallel()},
                                         {"up", tensor_parallel::colwise_parallel()},
                                         {"down", tensor_parallel::rowwise_parallel()}});
    fully_shard(mlp, (*mesh)["dp"], options);
  }
  for (int step = 0; step < 2; ++step) {
    const at::Tensor y = mlp(testing::uniform_values({5, 8}, 0.2));
    (mesh != nullptr ? DistributedTensor(y).full_tensor() : y).square().sum().backward();
  }
  std::vector<at::Tensor> gradients;
  for (const auto& [name, slot] : mlp.named_slots()) {
    gradients.push_back(full_tensor(slot->persistent().grad()));
  }
  return gradients;
}

TEST(TwoDimensional, RunsAUnitWhereARankHoldsNothing) {
  Options by_columns;
  by_columns.shard_placement = [](const std::string&, const at::Tensor& parameter) {
    return std::optional<Placement>(Shard{parameter.dim() - 1});
  };
  const std::vector<at::Tensor> expected = gradients_of_one_feature(nullptr, {});
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    for (const Options& options : {Options{}, by_columns}) {
      const std::vector<at::Tensor> gradients = gradients_of_one_feature(&mesh, options);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(gradients[i].allclose(expected[i], 1e-4, 1e-6)) << i;
      }
    }
  });
}

/// Eight ranks: two of tensor parallelism, and four that `shard` shards over.
void expect_training_in_three_dimensions(
    const std::function<void(nn::ModuleBase& module, const DeviceMesh& mesh)>& shard) {
  testing::Filled<SmallLlama> alone;
  const Outcome expected = train(alone, {}, 0, 1);
  RunOnMesh({2, 2, 2}, {"replicate", "dp", "tp"}, [&](const DeviceMesh& mesh) {
    testing::Filled<SmallLlama> model;
    tensor_parallel::parallelize_module(model, mesh["tp"], testing::plan_of_small_llama(true));
    for (const auto& block : model.blocks) {
      shard(*block, mesh);
    }
    shard(model, mesh);
    const StrictScope strict;
    const std::int64_t part = mesh.local_rank("replicate") * 2 + mesh.local_rank("dp");
    const Outcome outcome = train(model, {}, part, 4);
    expect_tensors(model, outcome, expected);
    for (std::size_t step = 0; step < 3; ++step) {
      EXPECT_NEAR(outcome.norms[step], expected.norms[step], 1e-5);
    }
  });
}

TEST(TwoDimensional, ReplicatesOverAThirdDimension) {
  expect_training_in_three_dimensions([](nn::ModuleBase& module, const DeviceMesh& mesh) {
    fully_shard(module, mesh[{"replicate", "dp"}]);
  });
}

TEST(TwoDimensional, ShardsOverAFlattenedMesh) {
  expect_training_in_three_dimensions([](nn::ModuleBase& module, const DeviceMesh& mesh) {
    fully_shard(module, mesh[{"replicate", "dp"}].flatten("all_dp"));
  });
}

TEST(TwoDimensional, TrainsInBfloat16) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](const DeviceMesh& mesh) {
    SmallLlama model;
    build(model, mesh, true,
          {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    const StrictScope strict;
    const Outcome outcome = train(model, {}, mesh.local_rank("dp"), 2);
    EXPECT_LT(outcome.losses.back(), 5.0);
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_EQ(slot->persistent().scalar_type(), at::kFloat) << name;
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
