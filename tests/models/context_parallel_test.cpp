// A Llama whose sequences are split against itself on one rank, in fp64.
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <memory>

#include "models/llama_run.h"
#include "tessera/models/parallelize.h"
#include "testing/errors.h"
#include "testing/module_values.h"
#include "testing/ranks.h"

namespace tessera::models {
namespace {

using testing::Rank;
using testing::RunRanks;

// 24 tokens are chunks of 6, 4 and 3 on 2, 3 and 4 ranks; over tp little divides.
constexpr Shape kSplitShape{
    R"({"vocab_size": 61, "hidden_size": 40, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "initializer_range": 0.2,
        "attention_bias": true, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 16})",
    6, 24};

/// Sizes of ("dp_replicate", "dp", "cp", "tp"), and how they compute.
struct SplitMesh {
  std::int64_t replicas, dp, cp, tp;
  bool sequence_parallel = true;
  ActivationMemory activations = ActivationMemory::kAll;
  std::int64_t window = 0;
  bool documents = false;
  bool in_parts = false;  ///< head and loss
};

std::shared_ptr<Llama> make_split_llama(const SplitMesh& c) {
  LlamaConfig config = parse_config(kSplitShape.config, "test");
  config.sliding_window = c.window;
  if (c.documents) {
    config.rope.scaling = {};
  }
  const auto model = std::make_shared<Llama>(config, kSplitShape.sequence);
  nn::init_weights(*model, 7);
  model->to(c10::kDouble);
  return model;
}

/// A document begins every 7 tokens, in each row elsewhere.
at::Tensor document_positions(std::int64_t first, std::int64_t last) {
  std::vector<at::Tensor> rows;
  for (std::int64_t row = first; row < last; ++row) {
    rows.push_back((at::arange(kSplitShape.sequence, c10::kLong) + row % 7).remainder(7));
  }
  return at::stack(rows);
}

/// Backward of the mean loss of rows [first, last), of this rank's tokens in them; that loss.
double step_of_rows(Llama& model, const SplitMesh& c, std::int64_t first, std::int64_t last) {
  const at::Tensor tokens = tokens_of(kSplitShape, model.config().vocab_size, 0, first, last);
  at::Tensor inputs = tokens.slice(1, 0, -1), targets = tokens.slice(1, 1);
  if (const auto& split = model.context_parallel()) {
    inputs = split->shard(inputs, 1);
    targets = split->shard(targets, 1);
  }
  const at::Tensor positions = c.documents ? document_positions(first, last) : at::Tensor();
  const at::Tensor loss =
      c.in_parts ? model(inputs, HeadLoss{targets.flatten(), {.chunks = 3}, positions})
                 : tensor_parallel::cross_entropy(
                       model(inputs, static_cast<KvCache*>(nullptr), positions), targets.flatten());
  loss.backward();
  return loss.item<double>();
}

DeviceMesh split_mesh(const Rank& rank, const SplitMesh& c) {
  return c.replicas > 1
             ? rank.mesh({c.replicas, c.dp, c.cp, c.tp}, {"dp_replicate", "dp", "cp", "tp"})
             : rank.mesh({c.dp, c.cp, c.tp}, {"dp", "cp", "tp"});
}

class SplitSequencesOn : public ::testing::TestWithParam<SplitMesh> {};

TEST_P(SplitSequencesOn, HaveTheLossAndGradientsOfOneRank) {
  const SplitMesh& c = GetParam();
  const auto alone = make_split_llama(c);
  const double loss = step_of_rows(*alone, c, 0, kSplitShape.batch);
  RunRanks(static_cast<int>(c.replicas * c.dp * c.cp * c.tp), [&](Rank& rank) {
    const DeviceMesh mesh = split_mesh(rank, c);
    const auto model = make_split_llama(c);
    parallelize(*model, mesh,
                {.sequence_parallel = c.sequence_parallel, .activations = c.activations});
    const StrictScope strict;
    const DeviceMesh batches = batch_mesh(mesh).flatten();
    const std::int64_t rows = kSplitShape.batch / batches.size();
    const std::int64_t first = batches.local_rank() * rows;
    at::Tensor mean = at::full({1}, step_of_rows(*model, c, first, first + rows), c10::kDouble);
    data_mesh(mesh).flatten().group().all_reduce(mean, ReduceOp::kAvg)->wait();
    EXPECT_NEAR(mean.item<double>(), loss, 1e-10);
    testing::expect_gradients(*model, testing::gradients_of(*alone), 1, 1e-10, 1e-10);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, SplitSequencesOn,
    ::testing::Values(SplitMesh{1, 1, 2, 1}, SplitMesh{1, 1, 3, 1},
                      SplitMesh{1, 1, 4, 1, true, ActivationMemory::kInputs},
                      SplitMesh{1, 1, 2, 2, false}, SplitMesh{1, 1, 3, 2},
                      SplitMesh{1, 1, 4, 2, true, ActivationMemory::kMatmuls},
                      SplitMesh{1, 2, 2, 2, true, ActivationMemory::kAll, 5},
                      SplitMesh{1, 1, 2, 4, true, ActivationMemory::kInputs, 0, true},
                      SplitMesh{2, 1, 2, 1, true, ActivationMemory::kAll, 0, false, true},
                      SplitMesh{1, 3, 2, 1, true, ActivationMemory::kAll, 9, true}));

TEST(SplitSequences, AreRefusedWithACache) {
  RunRanks(2, [](Rank& rank) {
    const SplitMesh c{1, 1, 2, 1};
    const auto model = make_split_llama(c);
    parallelize(*model, split_mesh(rank, c), {});
    KvCache cache = model->new_cache(8);
    EXPECT_ERROR((*model)(at::arange(8).view({1, 8}), &cache), "cache", "context parallelism");
    EXPECT_ERROR((*model)(at::arange(7).view({1, 7})), "14 tokens", "multiple of 4");
  });
}

}  // namespace
}  // namespace tessera::models
