// Compares cross_entropy and linear_cross_entropy on meshes with the same functions on one rank.

#include <c10/core/GradMode.h>

#include "tessera/kernels/fake_mode.h"
#include "tessera/nn/layers.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "testing/distributed.h"
#include "testing/environment.h"
#include "testing/memory.h"
#include "testing/module_values.h"

namespace tessera::tensor_parallel {
namespace {

at::Tensor some_logits(std::int64_t tokens, std::int64_t vocabulary) {
  return at::arange(tokens * vocabulary, at::kFloat)
      .mul(0.37)
      .sin()
      .mul(4)
      .view({tokens, vocabulary});
}

at::Tensor some_targets(std::int64_t tokens, std::int64_t vocabulary) {
  return at::arange(tokens, at::kLong).mul(7).add(2).remainder(vocabulary);
}

struct Expected {
  at::Tensor loss, gradient;
};

TEST(LossParallel, IsZeroIfAllTargetsAreIgnored) {
  const at::Tensor leaf = some_logits(3, 5).requires_grad_();
  const at::Tensor loss = cross_entropy(leaf, at::full({3}, -100, at::kLong));
  loss.backward();
  EXPECT_EQ(loss.item<float>(), 0);
  EXPECT_TRUE(leaf.grad().eq(0).all().item<bool>());
}

TEST(LossParallel, RefusesInvalidOptions) {
  const auto loss = [](const CrossEntropyOptions& options) {
    cross_entropy(some_logits(2, 3), some_targets(2, 3), options);
  };
  EXPECT_ERROR(loss({.label_smoothing = 1.5}), "label_smoothing is 1.5");
  EXPECT_ERROR(loss({.z_loss = -1}), "z_loss is -1");
  EXPECT_ERROR(loss({.reduction = at::Reduction::Sum, .tokens = at::ones({})}), ".tokens", "Mean");
  EXPECT_ERROR(loss({.tokens = at::ones({2})}), ".tokens", "[2]");
}

TEST(LossParallel, ComparesTargetsInDebugMode) {
  const testing::DebugChecks checks("1");
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const at::Tensor logits =
        distribute_tensor(some_logits(4, 6), rank.mesh({2}, {"tp"}), {Shard{1}}).tensor();
    cross_entropy(logits, some_targets(4, 6), {});
    cross_entropy(logits, (some_targets(4, 6) + rank.rank()).remainder(6), {});
  });
  EXPECT_CONTAINS(errors, "cross_entropy", "targets", "[0]", "2 on rank 0", "3 on rank 1",
                  "the same batch");
}

constexpr std::int64_t kMeshTokens = 7, kMeshVocabulary = 11;

at::Tensor mesh_logits() {
  return uniform_values({kMeshTokens, kMeshVocabulary}, 3).to(at::kDouble).mul(4);
}

at::Tensor mesh_targets() {
  const at::Tensor targets =
      at::arange(kMeshTokens, at::kLong).mul(3).add(1).remainder(kMeshVocabulary);
  targets[2] = -100;
  return targets;
}

/// Computes the expected loss from plain logits. `of_row`: factors of the rows for Reduction::None.
Expected loss_of_one_rank(const CrossEntropyOptions& options, const at::Tensor& of_row) {
  const at::Tensor leaf = mesh_logits().requires_grad_();
  const at::Tensor targets = mesh_targets();
  at::Tensor losses =
      at::cross_entropy_loss(leaf, targets, {}, at::Reduction::None, -100, options.label_smoothing);
  losses = losses + leaf.logsumexp(1).square().masked_fill(targets.eq(-100), 0) * options.z_loss;
  const at::Tensor loss = options.reduction == at::Reduction::None ? losses
                          : options.reduction == at::Reduction::Sum
                              ? losses.sum()
                              : losses.sum() / targets.ne(-100).sum();
  (options.reduction == at::Reduction::None ? (loss * of_row).sum() : loss).backward();
  return {loss.detach(), leaf.grad()};
}

struct MeshCase {
  std::vector<std::int64_t> mesh;
  Placements logits, targets;  ///< empty `targets`: the targets are plain
};

void expect_loss_of_one_rank(Rank& rank, const MeshCase& param,
                             const CrossEntropyOptions& options) {
  const at::Tensor of_row = at::arange(1, kMeshTokens + 1, at::kDouble);
  const Expected expected = loss_of_one_rank(options, of_row);
  const DeviceMesh mesh = rank.mesh(param.mesh, {"dp", "tp"});
  const at::Tensor logits = testing::leaf_on(mesh, mesh_logits(), param.logits);
  const at::Tensor targets = param.targets.empty()
                                 ? mesh_targets()
                                 : distribute_tensor(mesh_targets(), mesh, param.targets).tensor();
  const StrictScope strict;
  const at::Tensor loss = cross_entropy(logits, targets, options);
  const at::Tensor whole =
      tessera::is_distributed(loss) ? DistributedTensor(loss).full_tensor() : loss;
  const bool rows = options.reduction == at::Reduction::None;
  (rows ? (whole * of_row).sum() : whole).backward();

  EXPECT_TRUE(whole.allclose(expected.loss, 0, 1e-12)) << whole << expected.loss;
  const DistributedTensor gradient(logits.grad());
  EXPECT_EQ(gradient.layout(), DistributedTensor(logits).layout());
  EXPECT_TRUE(gradient.full_tensor().allclose(expected.gradient, 0, 1e-12));
}

TEST(LossOnMeshes, EqualsTheLossOfOneRank) {
  const Placement r = Replicate{}, s0 = Shard{0}, s1 = Shard{1};
  const std::vector<MeshCase> cases{
      {{2, 2}, {s0, s1}, {}}, {{2, 2}, {s0, s1}, {s0, r}}, {{2, 2}, {s0, s1}, {r, s0}},
      {{2, 2}, {s1, s0}, {}}, {{2, 2}, {s1, s1}, {}},      {{2, 2}, {s0, s0}, {s0, s0}},
      {{2, 2}, {r, s1}, {}},  {{2, 2}, {r, s1}, {r, r}},   {{2, 2}, {r, s1}, {s0, s0}},
      {{2, 2}, {r, r}, {}},   {{1, 4}, {s0, s1}, {}},      {{3, 1}, {s0, s1}, {}},
      {{2, 3}, {s1, s1}, {}}};
  for (const MeshCase& param : cases) {
    RunRanks(testing::ranks_of(param.mesh), [&](Rank& rank) {
      for (const CrossEntropyOptions& options :
           {CrossEntropyOptions{}, CrossEntropyOptions{.reduction = at::Reduction::Sum},
            CrossEntropyOptions{.reduction = at::Reduction::None},
            CrossEntropyOptions{.label_smoothing = 0.2, .z_loss = 0.03},
            CrossEntropyOptions{
                .reduction = at::Reduction::Sum, .label_smoothing = 1, .z_loss = 0.5}}) {
        expect_loss_of_one_rank(rank, param, options);
      }
    });
  }
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    const at::Tensor targets = mesh_targets();
    targets.narrow(0, 4, 3).fill_(-100);
    const at::Tensor logits = distribute_tensor(mesh_logits(), mesh, {Shard{0}}).tensor();
    const at::Tensor expected = cross_entropy(mesh_logits(), targets);
    EXPECT_TRUE(cross_entropy(logits, targets).allclose(expected, 0, 1e-12));
  });
}

// A plain target is the same on all ranks, so all ranks must throw if the target is invalid. For an
// invalid distributed target, only the ranks with this target must throw.
TEST(LossOnMeshes, FailsOnAllRanksForAnInvalidTarget) {
  for (const bool distributed : {false, true}) {
    const auto errors = testing::ErrorsOfRanks(2, [&](Rank& rank) {
      const DeviceMesh mesh = rank.mesh({2}, {"dp"});
      at::Tensor targets = mesh_targets();
      targets[kMeshTokens - 1] = kMeshVocabulary;
      if (distributed) {
        targets = distribute_tensor(targets, mesh, {Shard{0}}).tensor();
      }
      cross_entropy(distribute_tensor(mesh_logits(), mesh, {Shard{0}}).tensor(), targets);
    });
    EXPECT_CONTAINS(errors[1], "a target is outside the vocabulary [0, 11)");
    EXPECT_CONTAINS(errors[0], distributed ? "rank 1" : "a target is outside the vocabulary");
  }
}

TEST_ON_MESH(LossOnMeshes, RefusesUnsupportedLayouts, {2}, {"tp"}) {
  const at::Tensor terms = distribute_tensor(mesh_logits(), mesh, {Partial{}}).tensor();
  EXPECT_ERROR(cross_entropy(terms, mesh_targets()), "partial", "Shard(1)");
  const at::Tensor even = mesh_logits().narrow(1, 0, 8);
  const at::Tensor parts = distribute_tensor(even, mesh, {StridedShard{1, 2}}).tensor();
  EXPECT_ERROR(cross_entropy(parts, mesh_targets().remainder(8)), "are not consecutive");
  const at::Tensor targets = distribute_tensor(mesh_targets(), mesh, {Shard{0}}).tensor();
  EXPECT_ERROR(cross_entropy(mesh_logits(), targets), "full_tensor()");
  const DeviceMesh other = rank.mesh({2, 1}, {"a", "b"});
  const at::Tensor columns = distribute_tensor(mesh_logits(), other, {Shard{1}, Replicate{}});
  EXPECT_ERROR(cross_entropy(columns, targets), "full_tensor()");
}

constexpr std::int64_t kHeadTokens = 10, kHeadFeatures = 6, kHeadVocabulary = 13;

at::Tensor head_hidden() {
  return uniform_values({kHeadTokens, kHeadFeatures}, 3).to(at::kDouble);
}

at::Tensor head_weight() {
  return uniform_values({kHeadVocabulary, kHeadFeatures}, 5).to(at::kDouble);
}

at::Tensor head_targets() {
  const at::Tensor targets =
      at::arange(kHeadTokens, at::kLong).mul(3).add(1).remainder(kHeadVocabulary);
  targets[4] = -100;
  return targets;
}

/// The loss, and the gradients of the hidden states and of the head's weight, as plain tensors.
using HeadAnswer = std::vector<at::Tensor>;

/// Computes the expected loss from plain logits, and the gradients of `factor` times the loss.
HeadAnswer of_whole_logits(const CrossEntropyOptions& options, double factor = 1) {
  const at::Tensor hidden = head_hidden().requires_grad_();
  const at::Tensor weight = head_weight().requires_grad_();
  const at::Tensor loss = cross_entropy(at::linear(hidden, weight), head_targets(), options);
  loss.mul(factor).backward();
  return {loss.detach(), hidden.grad(), weight.grad()};
}

const std::vector<CrossEntropyOptions>& losses_of_heads() {
  static const std::vector<CrossEntropyOptions> all{
      {}, {.reduction = at::Reduction::Sum}, {.label_smoothing = 0.2, .z_loss = 0.03}};
  return all;
}

TEST(LinearCrossEntropy, OnMeshesEqualsTheLossOfWholeLogits) {
  struct HeadCase {
    std::vector<std::int64_t> mesh;
    Placements hidden, weight;
  };
  const Placement r = Replicate{}, s0 = Shard{0};
  for (const HeadCase& c :
       {HeadCase{{1, 2}, {r, r}, {r, s0}}, HeadCase{{1, 3}, {r, s0}, {r, s0}},
        HeadCase{{2, 2}, {s0, r}, {r, s0}}, HeadCase{{2, 2}, {s0, s0}, {r, s0}},
        HeadCase{{2, 2}, {r, r}, {s0, s0}}, HeadCase{{3, 1}, {s0, r}, {r, r}}}) {
    RunOnMesh(c.mesh, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
      const StrictScope strict;
      for (const CrossEntropyOptions& options : losses_of_heads()) {
        for (const std::int64_t chunks : {1, 3, 20}) {
          const at::Tensor hidden = testing::leaf_on(mesh, head_hidden(), c.hidden);
          const at::Tensor weight = testing::leaf_on(mesh, head_weight(), c.weight);
          const at::Tensor loss = linear_cross_entropy(hidden, weight, head_targets(),
                                                       {.loss = options, .chunks = chunks});
          loss.mul(3).backward();
          EXPECT_EACH({loss.detach(), hidden.grad(), weight.grad()}, of_whole_logits(options, 3),
                      1e-12, 1e-12);
        }
      }
    });
  }
}

TEST(LinearCrossEntropy, SupportsRepeatedBackwardAndRequestedGradients) {
  const at::Tensor weight = head_weight().requires_grad_();
  const at::Tensor loss =
      linear_cross_entropy(head_hidden(), weight, head_targets(), {.chunks = 2});
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_TRUE(weight.grad().allclose(of_whole_logits({})[2].mul(2), 1e-12, 1e-12));
  // linear_cross_entropy() with Reduction::None does not support backward.
  const c10::NoGradGuard no_grad;
  const CrossEntropyOptions rows{.reduction = at::Reduction::None};
  const at::Tensor losses = linear_cross_entropy(head_hidden(), head_weight(), head_targets(),
                                                 {.loss = rows, .chunks = 3});
  const at::Tensor expected =
      cross_entropy(at::linear(head_hidden(), head_weight()), head_targets(), rows);
  EXPECT_TRUE(losses.allclose(expected, 1e-12, 1e-12));
}

/// In fp16 and bf16, the error of a gradient must be at most one rounding to this dtype.
TEST(LinearCrossEntropy, InHalfPrecisionIsAccurate) {
  constexpr double kFactor = 1.0 / 3;
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    for (const auto& [type, tolerance] : {std::pair(at::kHalf, 2e-3), {at::kBFloat16, 1.6e-2}}) {
      const at::Tensor hidden = testing::leaf_on(mesh, head_hidden().to(type), {Replicate{}});
      const at::Tensor weight = testing::leaf_on(mesh, head_weight().to(type), {Shard{0}});
      const at::Tensor loss = linear_cross_entropy(hidden, weight, head_targets(), {.chunks = 4});
      loss.mul(kFactor).backward();
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
      EXPECT_EQ(weight.grad().scalar_type(), type);
      const auto in_double = [](const at::Tensor& x) { return full_tensor(x).to(at::kDouble); };
      EXPECT_EACH({in_double(loss), in_double(hidden.grad()), in_double(weight.grad())},
                  of_whole_logits({}, kFactor), tolerance, tolerance);
    }
  });
}

// In bf16 a large sum would no longer change: each further term would be rounded away.
TEST(LinearCrossEntropy, SumsTheGradientOfABf16WeightInFp32) {
  const auto gradient_of = [](std::int64_t tokens, std::int64_t chunks) {
    const at::Tensor hidden = at::ones({tokens, 2}, at::kBFloat16);
    const at::Tensor weight = at::zeros({4, 2}, at::kBFloat16).requires_grad_();
    linear_cross_entropy(hidden, weight, at::zeros({tokens}, at::kLong),
                         {.loss = {.reduction = at::Reduction::Sum}, .chunks = chunks})
        .backward();
    return weight.grad();
  };
  const at::Tensor gradient = gradient_of(1000, 1000);
  EXPECT_EQ(gradient[1][0].item<double>(), 250);
  EXPECT_EQ(gradient[0][0].item<double>(), -752);
  for (const std::int64_t chunks : {1, 2, 7, 16, 64}) {
    EXPECT_EQ(gradient_of(64, chunks)[1][0].item<double>(), 16) << chunks;
  }
}

/// Simulates the head and the loss of a 1B model on a GPU: measures memory, computes no values.
TEST(LinearCrossEntropy, NeedsLessThanTwoGigabytes) {
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
  // Peak memory contains the weight's gradient in fp32, and a chunk of the logits or the weight's
  // gradient in bf16. llama_train also limits chunks to 640 MiB.
  const LinearCrossEntropyOptions parts{.chunk_bytes = std::int64_t{640} << 20};
  EXPECT_LT(peak([&] { return linear_cross_entropy(hidden, weight, targets, parts); }),
            1'750'000'000);
  // A chunk of 2048 tokens has three matrix products: the logits, and two gradients.
  EXPECT_EQ(flops, 3 * 2.0 * kTokens * kVocabulary * kFeatures);
  EXPECT_EQ(products, 3 * kTokens / 2048);
  EXPECT_GT(peak([&] { return cross_entropy(at::linear(hidden, weight), targets); }),
            2 * 2 * kTokens * kVocabulary);
}

TEST(LinearCrossEntropy, RefusesInvalidInputs) {
  const at::Tensor hidden = head_hidden(), weight = head_weight(), targets = head_targets();
  const auto run = [&](const LinearCrossEntropyOptions& options) {
    linear_cross_entropy(hidden.clone().requires_grad_(), weight, targets, options);
  };
  EXPECT_ERROR(run({.chunks = -1}), ".chunks is -1");
  EXPECT_ERROR(run({.chunk_bytes = 0}), ".chunk_bytes 0");
  EXPECT_ERROR(run({.loss = {.reduction = at::Reduction::None}}), "None");
  EXPECT_ERROR(run({.loss = {.z_loss = -1}}), "z_loss is -1");
  EXPECT_ERROR(linear_cross_entropy(hidden, weight.t(), targets), "(vocabulary, features)");
  EXPECT_ERROR(linear_cross_entropy(hidden.to(at::kFloat), weight, targets), "of the same type");
  EXPECT_ERROR(linear_cross_entropy(hidden, weight, targets.add(13)), "outside the vocabulary");
  testing::Filled<nn::Linear> biased(kHeadFeatures, kHeadVocabulary);
  EXPECT_ERROR(linear_cross_entropy(hidden.to(at::kFloat), biased, targets), "{.bias = false}");
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    const at::Tensor rows = distribute_tensor(weight, mesh, {Shard{0}}).tensor();
    const at::Tensor columns = distribute_tensor(weight, mesh, {Shard{1}}).tensor();
    const at::Tensor whole = distribute_tensor(hidden, mesh, {Replicate{}}).tensor();
    EXPECT_ERROR(linear_cross_entropy(hidden, rows, targets), "plain", "distributed");
    EXPECT_ERROR(linear_cross_entropy(whole, columns, targets), "the weight is Shard(1)");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
