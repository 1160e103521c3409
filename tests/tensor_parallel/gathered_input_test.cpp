// Tests column-wise products whose backward gathers the input instead of saving it, also in fp8.

#include <torch/csrc/autograd/autograd.h>

#include <tuple>

#include "tessera/kernels/detail/fused.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/tensor_parallel/styles.h"
#include "testing/added_terms.h"
#include "testing/distributed.h"
#include "testing/memory.h"
#include "testing/module_values.h"
#include "testing/small_llama.h"

namespace tessera::tensor_parallel {
namespace {

at::Tensor split_leaf(const at::Tensor& value, const DeviceMesh& mesh) {
  return testing::leaf_on(mesh, value, {Shard{0}});
}

/// Runs two micro-batches of a block. Returns the output, the gradient of the input, and the
/// gradients of the parameters, all as local tensors.
std::vector<at::Tensor> results_of_block(Rank& rank, bool regather,
                                         const testing::SmallLlamaConfig& config,
                                         at::ScalarType type) {
  const DeviceMesh mesh = rank.mesh({rank.size()}, {"tp"});
  testing::Filled<testing::LlamaBlock> block(config);
  block.to(type);
  parallelize_module(block, mesh, testing::plan_of_block(regather));
  const at::Tensor x = split_leaf(uniform_values({10, config.dim}, 0.2).to(type), mesh);
  const StrictScope strict;
  at::Tensor y;
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    y = DistributedTensor(block(x)).to_local();
    y.square().sum().backward();
  }
  std::vector<at::Tensor> results{y.detach(), local_tensor(x.grad())};
  for (const auto& [name, slot] : block.named_slots()) {
    results.push_back(local_tensor(slot->get().grad()));
  }
  return results;
}

// The bias must be added before the product is rounded to bf16.
TEST(GatheredInput, EqualsASavedInput) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const auto& [ranks, bias, together] : {std::tuple(2, false, false),
                                                {2, false, true},
                                                {2, true, true},
                                                {3, true, false},
                                                {3, true, true}}) {
      const testing::SmallLlamaConfig config{.bias = bias, .together = together};
      RunRanks(ranks, [&](Rank& rank) {
        EXPECT_EACH(results_of_block(rank, true, config, type),
                    results_of_block(rank, false, config, type))
            << type;
      });
    }
  }
}

// A block gathers the results of two norms, and saves both. With `regather`, backward recomputes
// and gathers the results, so the block saves only copies of the norms' weights.
TEST(GatheredInput, SavesAtMostItsShard) {
  constexpr std::int64_t kTokens = 16, kRanks = 4;
  const testing::SmallLlamaConfig config{.dim = 32, .inner = 32, .hidden = 64};
  RunOnMesh({kRanks}, {"tp"}, [&](const DeviceMesh& mesh) {
    const auto kept_bytes = [&](bool regather) {
      testing::Filled<testing::LlamaBlock> block(config);
      parallelize_module(block, mesh, testing::plan_of_block(regather));
      const at::Tensor x = split_leaf(uniform_values({kTokens, config.dim}, 0.2), mesh);
      block(x);  // warm-up: the first call allocates more.
      const testing::MemoryScope memory;
      const at::Tensor y = block(x);
      return memory.bytes();
    };
    EXPECT_EQ(kept_bytes(false) - kept_bytes(true), 2 * 4 * (kTokens - 1) * config.dim);
  });
}

void parallelize_mixer(testing::Mixer& mixer, const DeviceMesh& mesh) {
  parallelize_module(mixer, mesh,
                     {{"", prepare_module_input({.input_layouts = {Shard{0}},
                                                 .desired_input_layouts = {Replicate{}}})},
                      {"[qkv]", colwise_parallel()},
                      {"o", rowwise_parallel()}});
}

/// The test parameter: whether q, k and v are computed by one autograd function.
class SharedGatheredInput : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Together, SharedGatheredInput, ::testing::Bool());

TEST_P(SharedGatheredInput, IsGatheredOnceAndReducedBeforeWeightGradients) {
  RunOnMesh({2}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    testing::Filled<testing::Mixer> mixer(testing::SmallLlamaConfig{.together = GetParam()});
    parallelize_mixer(mixer, mesh);
    const at::Tensor x = split_leaf(uniform_values({5, 8}, 0.2), mesh);
    const at::Tensor y = mixer(x);
    const Sent sent(rank);
    std::vector<std::int64_t> reduced;
    for (const auto& linear : {mixer.q, mixer.k, mixer.v}) {
      linear->weight->register_hook(
          [&](const at::Tensor&) { reduced.push_back(sent.calls("tp", "reduce_scatter")); });
    }
    y.square().sum().backward();
    EXPECT_EQ(reduced, (std::vector<std::int64_t>{1, 1, 1}));
    EXPECT_EQ(sent.calls("tp", "all_gather"), 1);
    EXPECT_EQ(sent.calls("tp", "reduce_scatter"), 1);
  });
}

// The recomputation of activation checkpointing gathers the input. Backward must not gather again.
TEST_P(SharedGatheredInput, IsNotGatheredTwiceUnderActivationCheckpointing) {
  RunOnMesh({2}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool checkpointed : {false, true}) {
      testing::Filled<testing::Mixer> mixer(testing::SmallLlamaConfig{.together = GetParam()});
      parallelize_mixer(mixer, mesh);
      if (checkpointed) {
        nn::apply_activation_checkpointing(
            mixer, [](const std::string& name, const auto&) { return name.empty(); });
      }
      const at::Tensor x = split_leaf(uniform_values({5, 8}, 0.2), mesh);
      const at::Tensor y = mixer(x);
      const Sent sent(rank);
      std::int64_t reduced = 0;
      mixer.q->weight->register_hook(
          [&](const at::Tensor&) { reduced = sent.calls("tp", "reduce_scatter"); });
      y.square().sum().backward();
      EXPECT_EQ(sent.calls("tp", "all_gather"), 1);
      EXPECT_EQ(reduced, sent.calls("tp", "reduce_scatter"));
      results.push_back({local_tensor(x.grad())});
      for (const auto& [name, slot] : mixer.named_slots()) {
        results.back().push_back(local_tensor(slot->get().grad()));
      }
    }
    EXPECT_EACH(results[1], results[0]);
  });
}

TEST_P(SharedGatheredInput, SupportsSeveralBackwardsAndFrozenParameters) {
  RunOnMesh({2}, {"tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    testing::Filled<testing::Mixer> mixer(
        testing::SmallLlamaConfig{.bias = true, .together = GetParam()});
    mixer.q->slot("weight")->get().set_requires_grad(false);
    mixer.k->slot("bias")->get().set_requires_grad(false);
    parallelize_mixer(mixer, mesh);
    const at::Tensor x = split_leaf(uniform_values({5, 8}, 0.2), mesh);
    const at::Tensor loss = mixer(x).square().sum();
    loss.backward({}, /*retain_graph=*/true);
    const at::Tensor of_x = local_tensor(x.grad()).clone();
    const at::Tensor of_k = local_tensor(mixer.k->weight->grad()).clone();
    const at::Tensor of_q_bias = local_tensor(mixer.q->bias->grad()).clone();
    EXPECT_FALSE(mixer.q->weight->grad().defined());
    EXPECT_FALSE(mixer.k->bias->grad().defined());
    // The gradient of a weight needs the gathered input; the gradient of the input does not.
    const Sent sent(rank);
    const at::Tensor alone = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
    EXPECT_EQ(sent.calls("tp", "all_gather"), 0);
    EXPECT_TRUE(local_tensor(alone).equal(of_x));
    loss.backward();
    EXPECT_TRUE(local_tensor(x.grad()).equal(of_x.mul(2)));
    EXPECT_TRUE(local_tensor(mixer.q->bias->grad()).equal(of_q_bias.mul(2)));
    // The second product was added in place to the first gradient, so rounding can differ.
    EXPECT_TRUE(local_tensor(mixer.k->weight->grad()).allclose(of_k.mul(2), 1e-5, 1e-6));
  });
}

TEST(GatheredInput, AccumulatesProductsInPlace) {
  testing::AddedTerms::reset();
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    testing::Filled<testing::LlamaBlock> block(testing::SmallLlamaConfig{});
    parallelize_module(block, mesh, testing::plan_of_block(/*regather=*/true));
    const at::Tensor x = split_leaf(uniform_values({10, 8}, 0.2), mesh);
    const testing::AddedTerms counted;
    DistributedTensor(block(x)).to_local().square().sum().backward();
  });
  // In-place products (addmm_) on each of 2 ranks: 2 for q, k, v together, and 1 for gate and up.
  EXPECT_EQ(testing::AddedTerms::products(), 2 * 3);
}

TEST_ON_MESH(GatheredInput, RefusesASecondDerivative, {2}, {"tp"}) {
  testing::Filled<nn::Linear> linear(4, 6, {.bias = false});
  parallelize_module(linear, mesh, {{"", colwise_parallel({.input_layouts = Shard{0}})}});
  const at::Tensor x = split_leaf(uniform_values({4, 4}, 0.2), mesh);
  const at::Tensor loss = linear(x).square().sum();
  EXPECT_ERROR(torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true), "create_graph",
               ".regather = false");
}

TEST_ON_MESH(GatheredInput, MayBeAVector, {2}, {"tp"}) {
  testing::Filled<nn::Linear> linear(5, 6, {.bias = false});
  const at::Tensor weight = linear.weight->detach().clone();
  parallelize_module(linear, mesh, {{"", colwise_parallel({.input_layouts = Shard{0}})}});
  const at::Tensor x = split_leaf(uniform_values({5}, 0.2), mesh);
  linear(x).sum().backward();
  EXPECT_TRUE(full_tensor(x.grad()).allclose(weight.sum(0)));
}

TEST(GatheredInput, SupportsInPlaceChangesOfTheProduct) {
  for (const bool local : {false, true}) {
    RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
      testing::Filled<nn::Linear> linear(4, 6);
      parallelize_module(
          linear, mesh,
          {{"", colwise_parallel({.input_layouts = Shard{0}, .use_local_output = local})}});
      const at::Tensor x = split_leaf(uniform_values({2, 3, 4}, 0.2), mesh);
      linear(x).mul_(3).sum().backward();
      EXPECT_TRUE(local_tensor(linear.bias->grad()).equal(at::full({3}, 18.0)));
    });
  }
}

using Tensors = std::vector<at::Tensor>;

constexpr testing::SmallLlamaConfig kConfig{.dim = 32, .inner = 64, .hidden = 64};

struct ConvertedBlock : testing::Filled<testing::LlamaBlock> {
  ConvertedBlock() : testing::Filled<testing::LlamaBlock>(kConfig) {
    nn::convert_to_fp8(*this, {.multiple_of = 4});
  }
};

template <class Forward>
Tensors step(testing::LlamaBlock& block, const at::Tensor& x, Forward&& whole) {
  const at::Tensor y = block(x);
  whole(y).square().sum().backward();
  Tensors found{y.detach(), x.grad()};
  for (const auto& [name, slot] : block.named_slots()) {
    found.push_back(slot->get().grad());
  }
  return found;
}

at::Tensor input() {
  return uniform_values({12, kConfig.dim}, 0.2);
}

Tensors step_alone() {
  ConvertedBlock block;
  return step(block, input().requires_grad_(), [](const at::Tensor& y) { return y; });
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).norm().item<double>() / b.norm().item<double>();
}

/// The tolerance 5e-3 is smaller than the difference between fp8 and fp32, which is above 1e-2.
TEST(Fp8UnderTensorParallelism, HasTheResultsOfOneRank) {
  const Tensors expected = step_alone();
  for (const int ranks : {2, 4}) {
    for (const bool regather : {true, false}) {
      RunOnMesh({ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
        ConvertedBlock block;
        parallelize_module(block, mesh, testing::plan_of_block(regather));
        const Tensors found = step(block, split_leaf(input(), mesh), [](const at::Tensor& y) {
          return DistributedTensor(y).full_tensor();
        });
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_LE(relative_error(full_tensor(found[i]), expected[i]), 5e-3) << i;
        }
      });
    }
  }
}

TEST(Fp8UnderTensorParallelism, DiffersFromFp32) {
  const Tensors expected = step_alone();
  testing::Filled<testing::LlamaBlock> block(kConfig);
  const Tensors found =
      step(block, input().requires_grad_(), [](const at::Tensor& y) { return y; });
  EXPECT_GT(relative_error(found.back(), expected.back()), 1e-2);
  EXPECT_LT(relative_error(found.back(), expected.back()), 1e-1);
}

TEST(Fp8UnderTensorParallelism, ComputesReplicatedHeads) {
  const at::Tensor x = uniform_values({6, 16}, 0.2);
  RunOnMesh({4}, {"tp"}, [&](const DeviceMesh& mesh) {
    testing::Filled<nn::Linear> linear(16, 32, nn::LinearOptions{.bias = false});
    nn::convert_to_fp8(linear);
    const at::Tensor expected = kernels::fp8_linear(x, linear.weight->detach());
    parallelize_module(linear, mesh, {{"", replicated_heads_parallel({.heads = 2})}});
    const at::Tensor y = local_tensor(linear(x));
    EXPECT_TRUE(y.equal(expected.narrow(1, mesh.local_rank() / 2 * 16, 16)));
  });
}

TEST_ON_MESH(Fp8UnderTensorParallelism, RefusesToConvertDistributedLinears, {2}, {"tp"}) {
  testing::Filled<nn::Linear> linear(16, 32);
  parallelize_module(linear, mesh, {{"", colwise_parallel()}});
  EXPECT_ERROR(nn::convert_to_fp8(linear), "is distributed already", "before parallelize_module");
}

}  // namespace
}  // namespace tessera::tensor_parallel
