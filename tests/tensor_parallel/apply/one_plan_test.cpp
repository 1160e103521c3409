// A model that was written for one rank, with all that plans used to need entries for, under a plan
// of column-wise and row-wise entries alone. The oracle is the same program on one rank.

#include "tessera/dtensor/manual_seed.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"

namespace tessera::tensor_parallel::one_plan {
namespace {

using testing::full_tensor;

constexpr std::int64_t kBatch = 4, kTokens = 6, kDim = 24, kHeads = 6, kHeadDim = kDim / kHeads;
constexpr std::int64_t kInner = 20, kExperts = 5, kWidth = 7, kVocabulary = 13;

/// Experts whose weights are stacked, each token mixed from the two that its router prefers.
struct Experts : nn::Module<Experts> {
  Experts() {
    up = register_slot("up", {kExperts, kDim, kWidth});
    down = register_slot("down", {kExperts, kWidth, kDim});
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor chances = (*router)(x).softmax(-1);
    const auto [best, indices] = chances.topk(2, -1);
    const at::Tensor gates = at::zeros_like(chances).scatter(-1, indices, best);
    const at::Tensor inner = at::gelu(at::matmul(x.unsqueeze(-3), *up));  // (batch, expert, ...)
    const at::Tensor outer = at::matmul(inner, *down);
    return (outer * gates.transpose(-1, -2).unsqueeze(-1)).sum(-3);
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(up, nn::init::normal(0, 0.2));
    init.fill(down, nn::init::normal(0, 0.2));
  }
  nn::Child<nn::Linear> router{*this, "router", kDim, kExperts, nn::LinearOptions{.bias = false}};
  nn::Parameter up, down;
};

struct Block : nn::Module<Block> {
  Block() { gain = register_slot("gain", {kHeads, 1, 1}); }
  /// The result, and an auxiliary loss of the heads.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const std::vector<at::Tensor> parts = (*qkv)((*first_norm)(x)).chunk(3, -1);
    const auto heads = [&](const at::Tensor& t) {
      return t.view({x.size(0), x.size(1), -1, kHeadDim});
    };
    const at::Tensor mixed =
        at::scaled_dot_product_attention((*q_norm)(heads(parts[0])).transpose(1, 2),
                                         (*k_norm)(heads(parts[1])).transpose(1, 2),
                                         heads(parts[2]).transpose(1, 2), {}, 0.2, true) *
        *gain;
    const at::Tensor auxiliary = mixed.square().mean();
    const at::Tensor h = x + (*dropout)((*out)(mixed.transpose(1, 2).flatten(2)));
    const at::Tensor normed = (*second_norm)(h);
    const at::Tensor mlp = (*down)(at::gelu((*up)(normed)));
    return {h + at::dropout(mlp, 0.1, true) + (*experts)(normed), auxiliary};
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(gain, nn::init::normal(1, 0.3));
  }
  nn::Child<nn::LayerNorm> first_norm{*this, "first_norm", kDim};
  nn::Child<nn::LayerNorm> second_norm{*this, "second_norm", kDim};
  nn::Child<nn::Linear> qkv{*this, "qkv", kDim, 3 * kDim};
  nn::Child<nn::RMSNorm> q_norm{*this, "q_norm", kHeadDim}, k_norm{*this, "k_norm", kHeadDim};
  nn::Child<nn::Linear> out{*this, "out", kDim, kDim};
  nn::Child<nn::Dropout> dropout{*this, "dropout", 0.1};
  nn::Child<nn::Linear> up{*this, "up", kDim, kInner}, down{*this, "down", kInner, kDim};
  nn::Child<Experts> experts{*this, "experts"};
  nn::Parameter gain;
};

class Gpt : public nn::Module<Gpt> {
 public:
  Gpt() {
    embed = register_module("embed", std::make_shared<nn::Embedding>(kVocabulary, kDim));
    positions = register_slot("positions", {kTokens, kDim});
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>()));
    }
    norm = register_module("norm", std::make_shared<nn::LayerNorm>(kDim));
    head = register_module("head", std::make_shared<nn::Linear>(kDim, kVocabulary));
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    at::Tensor x = (*embed)(tokens) + *positions;
    std::vector<at::Tensor> auxiliary;
    for (const auto& block : blocks) {
      auto [y, loss] = (*block)(x);
      x = y;
      auxiliary.push_back(loss);
    }
    const at::Tensor logits = (*head)((*norm)(x)).flatten(0, 1);
    return at::cross_entropy_loss(logits, targets.flatten()) + 0.3 * at::stack(auxiliary).sum();
  }
  void reset_parameters(const nn::InitContext& init) override {
    init.fill(positions, nn::init::normal(0, 0.3));
  }
  std::shared_ptr<nn::Embedding> embed;
  nn::Parameter positions;
  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<nn::LayerNorm> norm;
  std::shared_ptr<nn::Linear> head;
};

ParallelizePlan plan(bool sequence_parallel) {
  const Placement between = sequence_parallel ? Placement(Shard{1}) : Replicate{};
  return {{"block*.qkv", colwise_parallel()},
          {"block*.out", rowwise_parallel({.output_layouts = between, .heads = kHeads})},
          {"block*.up", colwise_parallel()},
          {"block*.down", rowwise_parallel({.output_layouts = between})},
          {"head", colwise_parallel()}};
}

struct Result {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;
};

Result train_once(Rank& rank, const std::vector<std::int64_t>& sizes, bool sequence_parallel) {
  const DeviceMesh mesh = rank.mesh(sizes, {"dp", "tp"});
  Gpt model;
  nn::apply_lora(model, {.rank = 3, .alpha = 6, .targets = {"block*.qkv", "block*.out"}});
  for (const auto& [name, slot] : model.named_slots()) {
    slot->get().set_requires_grad(true);  // the adapters and what they stand beside
  }
  parallelize_module(model, mesh["tp"], plan(sequence_parallel));
  fsdp::fully_shard(*model.blocks[0], mesh["dp"]);
  fsdp::fully_shard(model, mesh["dp"]);
  nn::init_weights(model, 3);
  {
    const c10::NoGradGuard none;  // a B that is zero would hide A
    for (const auto& [name, slot] : model.named_slots()) {
      if (name.ends_with("lora_B.weight")) {
        slot->persistent().add_(0.2);
      }
    }
  }
  manual_seed(17);
  const at::Tensor ids =
      at::arange(kBatch * (kTokens + 1), at::kLong).mul(5).remainder(kVocabulary);
  const at::Tensor rows = ids.view({kBatch, kTokens + 1})
                              .chunk(sizes[0])[static_cast<std::size_t>(mesh.local_rank("dp"))];
  const at::Tensor loss = model(rows.slice(1, 0, kTokens), rows.slice(1, 1, kTokens + 1));
  loss.backward();
  at::Tensor mean = full_tensor(loss).clone();
  mesh.group("dp").all_reduce(mean, ReduceOp::kAvg)->wait();
  Result result{mean, {}};
  for (const auto& [name, slot] : model.named_slots()) {
    result.gradients.push_back(full_tensor(slot->persistent().grad()).clone());
  }
  return result;
}

class OnePlan : public ::testing::TestWithParam<std::vector<std::int64_t>> {};

TEST_P(OnePlan, WithColumnsAndRowsTrainsAsOneRankDoes) {
  Result expected;
  RunRanks(1, [&](Rank& rank) { expected = train_once(rank, {1, 1}, false); });
  for (const bool sequence_parallel : {false, true}) {
    RunRanks(testing::ranks_of(GetParam()), [&](Rank& rank) {
      const Result found = train_once(rank, GetParam(), sequence_parallel);
      EXPECT_TRUE(found.loss.allclose(expected.loss, 1e-5, 1e-6));
      ASSERT_EQ(found.gradients.size(), expected.gradients.size());
      for (std::size_t i = 0; i < expected.gradients.size(); ++i) {
        EXPECT_GT(expected.gradients[i].abs().max().item<double>(), 0) << i;
        EXPECT_TRUE(found.gradients[i].allclose(expected.gradients[i], 1e-3, 1e-5)) << i;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, OnePlan,
                         ::testing::Values(std::vector<std::int64_t>{1, 2},
                                           std::vector<std::int64_t>{2, 2},
                                           std::vector<std::int64_t>{1, 3}),
                         [](const auto& info) {
                           return "Dp" + std::to_string(info.param[0]) + "Tp" +
                                  std::to_string(info.param[1]);
                         });

TEST(OnePlanOfHeads, NamesThoseThatTheRanksDoNotDivide) {
  RunRanks(4, [](Rank& rank) {
    Gpt model;
    EXPECT_ERROR(parallelize_module(model, rank.mesh({4}, {"tp"}), plan(false)),
                 "'block0.out': rowwise_parallel: 6 heads cannot be shared out to 4 ranks");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel::one_plan
