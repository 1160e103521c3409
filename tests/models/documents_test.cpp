// A Llama of packed documents against the same documents by themselves, in fp64, and what it makes
// no masks for.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "models/llama_run.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/models/parallelize.h"
#include "testing/module_values.h"
#include "testing/ranks.h"

namespace tessera::models {
namespace {

using testing::Rank;
using testing::RunRanks;

constexpr Shape kPacked{
    R"({"vocab_size": 61, "hidden_size": 40, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "initializer_range": 0.2,
        "attention_bias": true})",
    3, 12};
/// Lengths of documents, by sequence.
const std::vector<std::vector<std::int64_t>> kLengths{{5, 1, 6}, {12}, {1, 1, 10}};

struct PackedRun {
  std::int64_t tp = 1;
  std::int64_t window = 0;
  ActivationMemory activations = ActivationMemory::kAll;
};

std::shared_ptr<Llama> make_packed_llama(const PackedRun& run) {
  LlamaConfig config = parse_config(kPacked.config, "test");
  config.sliding_window = run.window;
  const auto model = std::make_shared<Llama>(config, kPacked.sequence);
  nn::init_weights(*model, 7);
  model->to(c10::kDouble);
  return model;
}

at::Tensor packed_tokens() {
  return tokens_of(kPacked, 61, 0, 0, kPacked.batch).slice(1, 0, -1);
}

/// Gradients of the summed loss of all documents, one call each.
std::shared_ptr<Llama> trained_by_document(const PackedRun& run) {
  const auto model = make_packed_llama(run);
  const at::Tensor tokens = packed_tokens();
  for (std::size_t row = 0; row < kLengths.size(); ++row) {
    std::int64_t begin = 0;
    for (const std::int64_t length : kLengths[row]) {
      const at::Tensor own = tokens[static_cast<std::int64_t>(row)].narrow(0, begin, length);
      tensor_parallel::cross_entropy((*model)(own.unsqueeze(0)), own).mul(length).backward();
      begin += length;
    }
  }
  return model;
}

at::Tensor packed_positions() {
  std::vector<at::Tensor> rows;
  for (const std::vector<std::int64_t>& lengths : kLengths) {
    std::vector<at::Tensor> row;
    for (const std::int64_t length : lengths) {
      row.push_back(at::arange(length, c10::kLong));
    }
    rows.push_back(at::cat(row));
  }
  return at::stack(rows);
}

class PackedDocuments : public ::testing::TestWithParam<PackedRun> {};

TEST_P(PackedDocuments, HaveTheGradientsOfEachByItself) {
  const PackedRun& run = GetParam();
  const auto gradients = testing::gradients_of(*trained_by_document(run));
  RunRanks(static_cast<int>(run.tp), [&](Rank& rank) {
    const auto model = make_packed_llama(run);
    parallelize(*model, rank.mesh({1, run.tp}, {"dp", "tp"}), {.activations = run.activations});
    const StrictScope strict;
    const at::Tensor tokens = packed_tokens();
    tensor_parallel::cross_entropy(
        (*model)(tokens, static_cast<KvCache*>(nullptr), packed_positions()), tokens.flatten())
        .mul(tokens.numel())
        .backward();
    testing::expect_gradients(*model, gradients, 1, 1e-10, 1e-10);
  });
}

INSTANTIATE_TEST_SUITE_P(Runs, PackedDocuments,
                         ::testing::Values(PackedRun{}, PackedRun{1, 4}, PackedRun{2},
                                           PackedRun{2, 4, ActivationMemory::kMatmuls},
                                           PackedRun{2, 0, ActivationMemory::kInputs}));

/// Counts the tensors that have a row of the sequence for each token.
struct MaskCounter final : OperatorMode {
  explicit MaskCounter(std::int64_t tokens) : least(tokens * tokens) {}
  Results call(const Operator&, const std::function<Results()>& run) override {
    Results results = run();
    for (const c10::IValue& result : results) {
      count += result.isTensor() && result.toTensor().numel() >= least ? 1 : 0;
    }
    return results;
  }
  std::int64_t least;
  int count = 0;
};

TEST(LlamaMakesNoMask, ForAWindowOrDocuments) {
  LlamaConfig config = parse_config(kPacked.config, "test");
  for (const std::int64_t window : {0, 20}) {
    config.sliding_window = window;
    Llama model(config, 400);
    nn::init_weights(model, 7);
    const at::Tensor tokens = at::randint(61, {1, 400}, c10::kLong);
    const at::Tensor positions = at::arange(400, c10::kLong).remainder(130).unsqueeze(0);
    MaskCounter masks(400);
    const OperatorModeScope scope(masks);
    model(tokens).sum().backward();
    model(tokens, static_cast<KvCache*>(nullptr), positions).sum().backward();
    EXPECT_EQ(masks.count, 0) << "with a window of " << window;
  }
}

}  // namespace
}  // namespace tessera::models
