// Head and loss in one, against the loss of whole logits: on meshes, in half types, in a model, and
// in memory.
#include "tessera/tensor_parallel/linear_cross_entropy.h"

#include <c10/core/GradMode.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/module.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/distributed.h"
#include "testing/memory/memory_scope.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

using testing::full_tensor;

constexpr std::int64_t kHeadTokens = 10, kHeadFeatures = 6, kHeadVocabulary = 13;

at::Tensor head_hidden() {
  return testing::uniform_values({kHeadTokens, kHeadFeatures}, 3).to(at::kDouble);
}

at::Tensor head_weight() {
  return testing::uniform_values({kHeadVocabulary, kHeadFeatures}, 5).to(at::kDouble);
}

at::Tensor head_targets() {
  const at::Tensor targets =
      at::arange(kHeadTokens, at::kLong).mul(3).add(1).remainder(kHeadVocabulary);
  targets[4] = -100;
  return targets;
}

struct HeadAnswer {
  at::Tensor loss, hidden, weight;  ///< and the gradients, all whole
};

/// With the gradient of `factor` times the loss.
HeadAnswer of_whole_logits(const CrossEntropyOptions& options, double factor = 1) {
  const at::Tensor hidden = head_hidden().requires_grad_();
  const at::Tensor weight = head_weight().requires_grad_();
  const at::Tensor loss = cross_entropy(at::linear(hidden, weight), head_targets(), options);
  loss.mul(factor).backward();
  return {loss.detach(), hidden.grad(), weight.grad()};
}

void expect_answer(const HeadAnswer& answer, const HeadAnswer& expected, double tolerance) {
  const auto close = [&](const at::Tensor& a, const at::Tensor& b) {
    return a.to(at::kDouble).allclose(b, tolerance, tolerance);
  };
  EXPECT_TRUE(close(answer.loss, expected.loss)) << answer.loss << expected.loss;
  EXPECT_TRUE(close(answer.hidden, expected.hidden)) << answer.hidden << expected.hidden;
  EXPECT_TRUE(close(answer.weight, expected.weight)) << answer.weight << expected.weight;
}

const std::vector<CrossEntropyOptions>& losses_of_heads() {
  static const std::vector<CrossEntropyOptions> all{
      {}, {.reduction = Reduction::kSum}, {.label_smoothing = 0.2, .z_loss = 0.03}};
  return all;
}

struct HeadCase {
  std::vector<std::int64_t> mesh;
  Placements hidden, weight;
};

class LinearCrossEntropyOnMeshes : public ::testing::TestWithParam<HeadCase> {};

TEST_P(LinearCrossEntropyOnMeshes, EqualsTheLossOfWholeLogits) {
  const HeadCase& param = GetParam();
  const auto ranks = static_cast<int>(param.mesh[0] * param.mesh[1]);
  RunRanks(ranks, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh(param.mesh, {"dp", "tp"});
    const StrictScope strict;
    for (const CrossEntropyOptions& options : losses_of_heads()) {
      for (const std::int64_t chunks : {1, 3, 20}) {
        const auto leaf = [&](const at::Tensor& value, const Placements& placements) {
          return distribute_tensor(value, mesh, placements).tensor().detach().requires_grad_();
        };
        const at::Tensor hidden = leaf(head_hidden(), param.hidden);
        const at::Tensor weight = leaf(head_weight(), param.weight);
        const at::Tensor loss = linear_cross_entropy(hidden, weight, head_targets(),
                                                     {.loss = options, .chunks = chunks});
        loss.mul(3).backward();
        expect_answer({loss.detach(), full_tensor(hidden.grad()), full_tensor(weight.grad())},
                      of_whole_logits(options, 3), 1e-12);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Placements, LinearCrossEntropyOnMeshes,
    ::testing::Values(HeadCase{{1, 2}, {Replicate{}, Replicate{}}, {Replicate{}, Shard{0}}},
                      HeadCase{{1, 3}, {Replicate{}, Shard{0}}, {Replicate{}, Shard{0}}},
                      HeadCase{{2, 2}, {Shard{0}, Replicate{}}, {Replicate{}, Shard{0}}},
                      HeadCase{{2, 2}, {Shard{0}, Shard{0}}, {Replicate{}, Shard{0}}},
                      HeadCase{{2, 2}, {Replicate{}, Replicate{}}, {Shard{0}, Shard{0}}},
                      HeadCase{{3, 1}, {Shard{0}, Replicate{}}, {Replicate{}, Replicate{}}}));

TEST(LinearCrossEntropy, EqualsTheLossOfWholeLogitsOnOneRank) {
  for (const CrossEntropyOptions& options : losses_of_heads()) {
    for (const std::int64_t chunk_bytes : {1, 4 * 8 * 13, 1 << 20}) {
      const at::Tensor hidden = head_hidden().requires_grad_();
      const at::Tensor weight = head_weight().requires_grad_();
      const at::Tensor loss = linear_cross_entropy(hidden, weight, head_targets(),
                                                   {.loss = options, .chunk_bytes = chunk_bytes});
      loss.backward();
      expect_answer({loss.detach(), hidden.grad(), weight.grad()}, of_whole_logits(options), 1e-12);
    }
  }
}

TEST(LinearCrossEntropy, GivesGradientsAgainAndOnlyThoseWanted) {
  const at::Tensor weight = head_weight().requires_grad_();
  const at::Tensor loss =
      linear_cross_entropy(head_hidden(), weight, head_targets(), {.chunks = 2});
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_TRUE(weight.grad().allclose(of_whole_logits({}).weight.mul(2), 1e-12, 1e-12));
}

TEST(LinearCrossEntropy, GivesTheLossOfEachRowWithoutGradient) {
  const c10::NoGradGuard no_grad;
  const CrossEntropyOptions rows{.reduction = Reduction::kNone};
  const at::Tensor losses = linear_cross_entropy(head_hidden(), head_weight(), head_targets(),
                                                 {.loss = rows, .chunks = 3});
  const at::Tensor expected =
      cross_entropy(at::linear(head_hidden(), head_weight()), head_targets(), rows);
  EXPECT_TRUE(losses.allclose(expected, 1e-12, 1e-12));
}

/// Losses at the scale of a mean over many tokens, times a loss scale.
class LinearCrossEntropyInHalf : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(LinearCrossEntropyInHalf, RoundsNoMoreThanTheTypeDoes) {
  constexpr double kFactor = 1.0 / 3;
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    const auto leaf = [&](const at::Tensor& value, const Placement& placement) {
      return distribute_tensor(value.to(GetParam()), mesh, {placement})
          .tensor()
          .detach()
          .requires_grad_();
    };
    const at::Tensor hidden = leaf(head_hidden(), Replicate{});
    const at::Tensor weight = leaf(head_weight(), Shard{0});
    const at::Tensor loss = linear_cross_entropy(hidden, weight, head_targets(), {.chunks = 4});
    loss.mul(kFactor).backward();
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    EXPECT_EQ(weight.grad().scalar_type(), GetParam());
    const double tolerance = GetParam() == at::kHalf ? 2e-3 : 1.6e-2;
    expect_answer({loss.detach(), full_tensor(hidden.grad()), full_tensor(weight.grad())},
                  of_whole_logits({}, kFactor), tolerance);
  });
}

INSTANTIATE_TEST_SUITE_P(Types, LinearCrossEntropyInHalf,
                         ::testing::Values(at::kBFloat16, at::kHalf));

TEST(LinearCrossEntropy, SumsAHalfWeightsGradientInFp32) {
  // 1000 equal terms: in bf16 a sum stays where a term is less than half of its last bit.
  const std::int64_t tokens = 1000;
  const at::Tensor hidden = at::full({tokens, 2}, 1, at::kBFloat16);
  const at::Tensor weight = at::full({4, 2}, 0, at::kBFloat16).requires_grad_();
  const at::Tensor targets = at::full({tokens}, 0, at::kLong);
  linear_cross_entropy(hidden, weight, targets,
                       {.loss = {.reduction = Reduction::kSum}, .chunks = tokens})
      .backward();
  EXPECT_EQ(weight.grad()[1][0].item<double>(), 250);
  EXPECT_EQ(weight.grad()[0][0].item<double>(), -752);  // -750 in bf16
}

TEST(LinearCrossEntropy, TakesTheMemoryOfItsParts) {
  constexpr std::int64_t kVocabulary = 128256, kTokens = 48, kFeatures = 8;
  constexpr std::int64_t kLogits = 4 * kTokens * kVocabulary;
  constexpr std::int64_t kPart = kLogits / 8, kWeight = 4 * kVocabulary * kFeatures;
  const at::Tensor hidden = testing::uniform_values({kTokens, kFeatures}, 1).requires_grad_();
  const at::Tensor weight = testing::uniform_values({kVocabulary, kFeatures}, 2).requires_grad_();
  const at::Tensor targets = at::arange(kTokens, at::kLong).mul(2671);
  const auto run = [&](const auto& loss_of) {
    testing::MemoryScope memory;
    hidden.mutable_grad() = weight.mutable_grad() = at::Tensor();
    const at::Tensor loss = loss_of();
    loss.backward();
    return std::pair(loss.item<double>(), memory.peak());
  };
  const auto [expected, whole] =
      run([&] { return cross_entropy(at::linear(hidden, weight), targets); });
  const at::Tensor gradient = weight.grad();
  const auto [loss, peak] =
      run([&] { return linear_cross_entropy(hidden, weight, targets, {.chunk_bytes = kPart}); });
  EXPECT_NEAR(loss, expected, 1e-6 * expected);
  EXPECT_TRUE(weight.grad().allclose(gradient, 1e-4, 1e-8));
  // A part's logits in forward, or the gradient that backward gives out; a row in fp32 and what is
  // of a token.
  constexpr std::int64_t kSmall = 4 * 4 * kVocabulary + 100 * kTokens * kFeatures;
  EXPECT_LE(peak, kWeight + std::max(kPart, kWeight) + kSmall);
  EXPECT_GE(whole, 2 * kLogits);
}

/// The head of a 1B model and its loss on a GPU, without values.
TEST(LinearCrossEntropy, TakesLessThanOneAndAHalfGigabytes) {
  constexpr std::int64_t kVocabulary = 128256, kTokens = 16384, kFeatures = 2048;
  double flops = 0;
  std::int64_t products = 0;
  const kernels::FakeMode fake(c10::DeviceType::CUDA, [&](const kernels::FakeCall& call) {
    if (const bool adds = call.name.starts_with("aten::addmm"); adds || call.name == "aten::mm") {
      ++products;
      flops += 2.0 * static_cast<double>(call.results[0].numel() * call.inputs[adds].size(1));
    }
  });
  const at::TensorOptions bf16(at::kBFloat16);
  const at::Tensor hidden = at::empty({kTokens, kFeatures}, bf16).requires_grad_();
  const at::Tensor weight = at::empty({kVocabulary, kFeatures}, bf16).requires_grad_();
  const at::Tensor targets = at::arange(kTokens, at::kLong);
  const auto peak = [&](const auto& loss_of) {
    testing::MemoryScope memory;
    hidden.mutable_grad() = weight.mutable_grad() = at::Tensor();
    loss_of().backward();
    EXPECT_EQ(weight.grad().scalar_type(), at::kBFloat16);
    return memory.peak();
  };
  // As llama_train asks for them.
  const LinearCrossEntropyOptions parts{.chunk_bytes = std::int64_t{640} << 20};
  EXPECT_LT(peak([&] { return linear_cross_entropy(hidden, weight, targets, parts); }),
            1'200'000'000);
  // Three products of the whole, in parts of 2048 tokens.
  EXPECT_EQ(flops, 3 * 2.0 * kTokens * kVocabulary * kFeatures);
  EXPECT_EQ(products, 3 * kTokens / 2048);
  EXPECT_GT(peak([&] { return cross_entropy(at::linear(hidden, weight), targets); }),
            2 * 2 * kTokens * kVocabulary);
}

TEST(LinearCrossEntropy, SumsTheWeightsGradientOfFewPartsInBf16) {
  const at::Tensor hidden = at::ones({64, 2}, at::kBFloat16);
  const at::Tensor weight = at::zeros({4, 2}, at::kBFloat16).requires_grad_();
  const at::Tensor targets = at::zeros({64}, at::kLong);
  const auto sum_of_rows = [&](std::int64_t chunks) {
    weight.mutable_grad() = at::Tensor();
    linear_cross_entropy(hidden, weight, targets,
                         {.loss = {.reduction = Reduction::kSum}, .chunks = chunks})
        .backward();
    return weight.grad()[1][0].item<double>();
  };
  for (const std::int64_t chunks : {1, 2, 7, 16, 64}) {
    EXPECT_EQ(sum_of_rows(chunks), 16) << chunks;
  }
}

TEST(LinearCrossEntropy, RefusesWhatItCannotTake) {
  const at::Tensor hidden = head_hidden(), weight = head_weight(), targets = head_targets();
  const auto run = [&](const LinearCrossEntropyOptions& options) {
    linear_cross_entropy(hidden.clone().requires_grad_(), weight, targets, options);
  };
  EXPECT_ERROR(run({.chunks = -1}), "chunks are -1");
  EXPECT_ERROR(run({.chunk_bytes = 0}), "or 0 and a number of bytes");
  EXPECT_ERROR(run({.loss = {.reduction = Reduction::kNone}}), "kNone has no gradient here");
  EXPECT_ERROR(run({.loss = {.z_loss = -1}}), "z_loss is -1");
  EXPECT_ERROR(linear_cross_entropy(hidden, weight.t(), targets), "(vocabulary, features)");
  EXPECT_ERROR(linear_cross_entropy(hidden.to(at::kFloat), weight, targets), "of one type");
  EXPECT_ERROR(linear_cross_entropy(hidden, weight, targets.add(13)), "outside the vocabulary");
  testing::Filled<nn::Linear> biased(kHeadFeatures, kHeadVocabulary);
  EXPECT_ERROR(linear_cross_entropy(hidden.to(at::kFloat), biased, targets), "{.bias = false}");
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    const at::Tensor rows = distribute_tensor(weight, mesh, {Shard{0}}).tensor();
    const at::Tensor columns = distribute_tensor(weight, mesh, {Shard{1}}).tensor();
    const at::Tensor whole = distribute_tensor(hidden, mesh, {Replicate{}}).tensor();
    EXPECT_ERROR(linear_cross_entropy(hidden, rows, targets), "hidden is plain and weight is");
    EXPECT_ERROR(linear_cross_entropy(whole, columns, targets), "the weight is Shard(1)");
  });
}

/// Embedding, norm and head, tied or not.
struct HeadModel : nn::Module<HeadModel> {
  explicit HeadModel(bool tied) {
    embed =
        register_module("embed", std::make_shared<nn::Embedding>(kHeadVocabulary, kHeadFeatures));
    norm = register_module("norm", std::make_shared<nn::RMSNorm>(kHeadFeatures));
    head = register_module("head", std::make_shared<nn::Linear>(kHeadFeatures, kHeadVocabulary,
                                                                nn::LinearOptions{.bias = false}));
    if (tied) {
      head->tie_slot("weight", embed->weight.slot());
    }
    testing::fill(*this);
  }
  /// `chunks` 0: of whole logits.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets, std::int64_t chunks) {
    const at::Tensor hidden = (*norm)((*embed)(tokens));
    return chunks == 0 ? cross_entropy((*head)(hidden), targets)
                       : linear_cross_entropy(hidden, *head, targets, {.chunks = chunks});
  }
  std::shared_ptr<nn::Embedding> embed;
  std::shared_ptr<nn::RMSNorm> norm;
  std::shared_ptr<nn::Linear> head;
};

struct ModelCase {
  bool tied = false, sequence_parallel = true, reshard = true;
  int micro_batches = 1;
  bool bf16 = false;
};

class LinearCrossEntropyOfAModel : public ::testing::TestWithParam<ModelCase> {};

/// The gradients of two data-parallel ranks' micro-batches.
void run_head_model(HeadModel& model, int first, int last, std::int64_t chunks, bool sharded) {
  for (int i = first; i < last; ++i) {
    if (sharded) {
      fsdp::set_requires_gradient_sync(model, i + 1 == last);
    }
    const at::Tensor tokens = at::arange(12, at::kLong).mul(5).add(i).remainder(kHeadVocabulary);
    const at::Tensor targets = tokens.add(i + 1).remainder(kHeadVocabulary);
    model(tokens, targets, chunks).mul(sharded ? 1.0 : 0.5).backward();
  }
}

TEST_P(LinearCrossEntropyOfAModel, HasTheGradientsOfOneRank) {
  const ModelCase& param = GetParam();
  HeadModel expected(param.tied);
  run_head_model(expected, 0, 2 * param.micro_batches, 0, false);
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    HeadModel model(param.tied);
    const Placement between = param.sequence_parallel ? Placement(Shard{0}) : Replicate{};
    parallelize_module(
        model, mesh["tp"],
        {{"embed", rowwise_parallel({.input_layouts = Replicate{},
                                     .output_layouts = between,
                                     .use_local_output = false})},
         {"norm",
          param.sequence_parallel ? sequence_parallel({.sequence_dim = 0}) : replicate_parallel()},
         {"head", colwise_parallel({.input_layouts = between, .use_local_output = false})}});
    fsdp::Options options{.reshard_after_forward = param.reshard};
    if (param.bf16) {
      options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    }
    if (!param.tied) {  // else its weight is the root's
      fsdp::fully_shard(*model.head, mesh["dp"], options);
    }
    fsdp::fully_shard(model, mesh["dp"], options);
    const StrictScope strict;
    const auto of_rank = static_cast<int>(mesh.local_rank("dp")) * param.micro_batches;
    run_head_model(model, of_rank, of_rank + param.micro_batches, 3, true);
    const double tolerance = param.bf16 ? 2e-2 : 1e-5;
    testing::expect_gradients(model, testing::gradients_of(expected), 1, tolerance,
                              tolerance * 0.3);
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, LinearCrossEntropyOfAModel,
                         ::testing::Values(ModelCase{}, ModelCase{.sequence_parallel = false},
                                           ModelCase{.reshard = false, .micro_batches = 2},
                                           ModelCase{.tied = true, .micro_batches = 2},
                                           ModelCase{.bf16 = true}));

}  // namespace
}  // namespace tessera::tensor_parallel
