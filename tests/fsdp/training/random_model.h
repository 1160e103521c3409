#pragma once

// A model that draws random numbers in several places, trained on a mesh and on one rank.

#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/functional.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"

namespace tessera::fsdp::drawing {

inline constexpr std::int64_t kSequence = 3, kDim = 8, kInner = 16, kVocabulary = 11;
inline constexpr std::int64_t kHeadDim = 2;

using Draw = std::function<at::Tensor(const at::Tensor&)>;

inline at::Tensor keep(const at::Tensor& x) {
  return x;
}

/// The functions by which the model draws random numbers.
struct Draws {
  Draw residual = keep;
  Draw features = keep;  ///< `features` and `scores` get tensors sharded over tp
  Draw scores = keep;
  bool modules = false;  ///< `modules`: calls nn::Dropout modules instead of functions
  bool skips_empty = false;
  int quiet_forwards = 0;  ///< number of forwards at the start that draw no numbers
};

struct DrawingBlock : nn::Module<DrawingBlock> {
  explicit DrawingBlock(Draws d) : draws(std::move(d)) {}

  at::Tensor forward(const at::Tensor& x, std::int64_t batch) {
    skips_ = (draws.skips_empty && batch == 0) || forwards_ < draws.quiet_forwards;
    ++forwards_;
    const at::Tensor h = x + residual(attend((*norm)(x), batch));
    return h + residual((*down)(features(at::silu((*up)(h)))));
  }

  Draws draws;
  static constexpr nn::LinearOptions kNoBias{.bias = false};
  nn::Child<nn::RMSNorm> norm{*this, "norm", kDim};
  nn::Child<nn::Linear> q{*this, "q", kDim, kDim, kNoBias}, k{*this, "k", kDim, kDim, kNoBias};
  nn::Child<nn::Linear> v{*this, "v", kDim, kDim, kNoBias}, o{*this, "o", kDim, kDim, kNoBias};
  nn::Child<nn::Linear> up{*this, "up", kDim, kInner, kNoBias};
  nn::Child<nn::Linear> down{*this, "down", kInner, kDim, kNoBias};
  nn::Child<nn::Dropout> drop_residual{*this, "drop_residual", 0.4};
  nn::Child<nn::Dropout> drop_features{*this, "drop_features", 0.4};
  nn::Child<nn::Dropout> drop_scores{*this, "drop_scores", 0.4};

 private:
  at::Tensor residual(const at::Tensor& x) {
    return skips_ ? x : draws.modules ? (*drop_residual)(x) : draws.residual(x);
  }
  at::Tensor features(const at::Tensor& x) {
    return skips_ ? x : draws.modules ? (*drop_features)(x) : draws.features(x);
  }
  at::Tensor dropped_scores(const at::Tensor& x) {
    return skips_ ? x : draws.modules ? (*drop_scores)(x) : draws.scores(x);
  }
  at::Tensor attend(const at::Tensor& x, std::int64_t batch) {
    const auto heads = [&](const at::Tensor& t) {
      return t.view({batch, kSequence, t.size(1) / kHeadDim, kHeadDim}).transpose(1, 2);
    };
    const at::Tensor query = heads((*q)(x)), key = heads((*k)(x)), value = heads((*v)(x));
    const at::Tensor scores = query.matmul(key.transpose(2, 3)).div(2).softmax(-1);
    const at::Tensor folded = dropped_scores(scores).matmul(value).transpose(1, 2);
    return (*o)(folded.reshape({batch * kSequence, folded.size(2) * kHeadDim}));
  }
  bool skips_ = false;
  int forwards_ = 0;
};

/// A model that maps token ids (batch, sequence) to logits (tokens, vocabulary).
struct DrawingModel : nn::Module<DrawingModel> {
  explicit DrawingModel(const Draws& draws) {
    embed = register_module("embed", std::make_shared<nn::Embedding>(kVocabulary, kDim));
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(
          register_module("block" + std::to_string(i), std::make_shared<DrawingBlock>(draws)));
    }
    head = register_module("head", std::make_shared<nn::Linear>(kDim, kVocabulary));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = (*embed)(tokens.flatten());
    for (const auto& block : blocks) {
      x = (*block)(x, tokens.size(0));
    }
    return (*head)(x);
  }
  std::shared_ptr<nn::Embedding> embed;
  std::vector<std::shared_ptr<DrawingBlock>> blocks;
  std::shared_ptr<nn::Linear> head;
};

inline tensor_parallel::ParallelizePlan plan() {
  using namespace tensor_parallel;
  return {{"embed", rowwise_parallel()},
          {"block*.norm", replicate_parallel()},
          {"block*.[qkv]", colwise_parallel()},
          {"block*.o", rowwise_parallel()},
          {"block*.up", colwise_parallel()},
          {"block*.down", rowwise_parallel()},
          {"head", colwise_parallel({.output_layouts = Replicate{}})}};
}

struct RandomMesh {
  const char* name;
  std::vector<std::int64_t> sizes;
  std::vector<std::string> names;
};

inline at::Tensor token_ids(std::int64_t rows, int step) {
  return at::arange(rows * kSequence, at::kLong)
      .mul(7)
      .add(step)
      .remainder(kVocabulary)
      .view({rows, kSequence});
}

struct Result {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

using Rows = std::vector<std::int64_t>;

/// `rows`: the global number of rows in each step.
inline Result train(Rank& rank, const RandomMesh& how, const Draws& draws, const Rows& rows) {
  manual_seed(21);
  const DeviceMesh mesh = rank.mesh(how.sizes, how.names);
  DrawingModel model(draws);
  if (mesh.ndim() > 1) {
    tensor_parallel::parallelize_module(model, mesh["tp"], plan());
  }
  for (const auto& block : model.blocks) {
    fully_shard(*block, mesh["dp"]);
  }
  fully_shard(model, mesh["dp"]);
  nn::init_weights(model, 5);
  const std::int64_t ranks = mesh.size("dp"), own = mesh.local_rank("dp");
  Result result;
  for (std::size_t step = 0; step < rows.size(); ++step) {
    const at::Tensor tokens = token_ids(rows[step], static_cast<int>(step))
                                  .tensor_split(ranks, 0)[static_cast<std::size_t>(own)];
    const double scale = static_cast<double>(ranks) / static_cast<double>(rows[step]);
    const at::Tensor loss = model(tokens).square().sum().mul(scale);
    loss.backward();
    const at::Tensor sum = full_tensor(loss).clone();
    if (ranks > 1) {
      mesh.group("dp").all_reduce(sum, ReduceOp::kSum)->wait();
    }
    result.loss += sum.item<double>() / static_cast<double>(ranks);
  }
  for (const auto& [name, slot] : model.named_slots()) {
    result.gradients.push_back(full_tensor(slot->persistent().grad()).clone());
  }
  return result;
}

inline Result train_alone(const Draws& draws, const Rows& rows) {
  Result result;
  RunRanks(1, [&](Rank& rank) { result = train(rank, {"one", {1}, {"dp"}}, draws, rows); });
  return result;
}

inline void expect_same(const Result& found, const Result& expected) {
  EXPECT_NEAR(found.loss, expected.loss, 1e-5 * std::abs(expected.loss));
  EXPECT_EACH(found.gradients, expected.gradients, 1e-3, 1e-4);
}

inline void expect_as_alone(const RandomMesh& how, const Draws& draws, const Rows& rows) {
  const Result expected = train_alone(draws, rows);
  // The loss must depend on the random numbers, or the test would not notice wrong numbers.
  EXPECT_GT(std::abs(train_alone({}, rows).loss / expected.loss - 1), 1e-4);
  RunRanks(testing::ranks_of(how.sizes),
           [&](Rank& rank) { expect_same(train(rank, how, draws, rows), expected); });
}

inline at::Tensor dropped(const at::Tensor& x) {
  return at::dropout(x, 0.4, true);
}

inline const Draws& everywhere() {
  static const Draws draws{.residual = dropped, .features = dropped, .scores = dropped};
  return draws;
}
inline const Draws kModules{.modules = true};

}  // namespace tessera::fsdp::drawing
