// Tests this library's operators in operator modes and on meta tensors, and gradients that the
// operators refuse. operators_test.cpp tests the operators' values.

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "dtensor/listing_mode.h"
#include "dtensor/operators/operator_case.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/comm/trace.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/dtensor/detail/attention_kernel.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/kernels/fake_mode.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::expect_attention_of_parts;
using testing::values;
using Tensors = std::vector<at::Tensor>;

struct Function {
  const char* name;  ///< the operator's, without "tessera::"
  Tensors inputs;
  std::size_t differentiable;
  std::function<at::Tensor(const Tensors&)> run;
  std::vector<std::string> operators;  ///< `operators`: names of all called operators
};

std::vector<Function> functions() {
  std::vector<Function> all;
  const auto add = [&](const char* name, const Tensors& inputs, std::size_t differentiable,
                       auto run, const std::vector<std::string>& operators) {
    all.push_back({name, inputs, differentiable, run, operators});
  };
  add("silu_mul", {values({4, 6}), values({4, 6}, 1)}, 2,
      [](const Tensors& t) { return detail::silu_mul(t[0], t[1]); },
      {"tessera::silu_mul", "tessera::silu_mul_backward"});
  add("rms_norm", {values({4, 6}), values({6}, 1)}, 2,
      [](const Tensors& t) { return detail::rms_norm(t[0], t[1], 1e-5); },
      {"tessera::rms_norm", "tessera::rms_norm_backward"});
  add("rms_norm", {values({4, 6}), values({4, 6}, 1), values({6}, 2)}, 3,
      [](const Tensors& t) {
        const auto [out, sum] = detail::add_rms_norm(t[0], t[1], t[2], 1e-5);
        return out * sum;
      },
      {"tessera::add_rms_norm", "tessera::rms_norm_backward"});
  add("dropout", {values({4, 6})}, 1,
      [](const Tensors& t) { return detail::dropout(t[0], 0.4, {1, 2}); },
      {"tessera::dropout", "tessera::dropout"});
  add("embedding", {values({4, 6}), at::tensor({2, 0, 2}, at::kLong)}, 1,
      [](const Tensors& t) { return detail::embedding(t[0], t[1]); },
      {"tessera::embedding", "tessera::embedding_backward"});
  add("cross_entropy", {values({4, 6}), at::tensor({2, 0, -100, 5}, at::kLong)}, 1,
      [](const Tensors& t) { return detail::cross_entropy(t[0], t[1]); },
      {"tessera::cross_entropy", "tessera::cross_entropy_backward"});
  add("rotary_embedding", {values({4, 3, 2, 4}), values({3, 4}, 1), values({3, 4}, 2)}, 1,
      [](const Tensors& t) { return detail::rotary_embedding(t[0], t[1], t[2]); },
      {"tessera::rotary_embedding", "tessera::rotary_embedding"});
  add("rotary_embedding",
      {values({4, 3, 2, 4}), values({4, 3, 1, 4}, 3), values({3, 4}, 1), values({3, 4}, 2)}, 2,
      [](const Tensors& t) {
        const auto [q, k] = detail::rotary_embedding(t[0], t[1], t[2], t[3]);
        return q * k;
      },
      {"tessera::rotary_embedding_qk", "tessera::rotary_embedding_qk"});
  add("chunked_attention",
      {values({4, 4, 6, 8}), values({4, 2, 12, 8}, 1), values({4, 2, 12, 8}, 2)}, 3,
      [](const Tensors& t) { return detail::chunked_attention(t[0], t[1], t[2], {3, 9}); },
      {"tessera::chunked_attention", "tessera::chunked_attention_backward"});
  add("fp8_linear", {values({4, 6}), values({5, 6}, 1)}, 2,
      [](const Tensors& t) { return detail::fp8_linear(t[0], t[1]); },
      {"tessera::fp8_linear", "tessera::fp8_linear_input_grad", "tessera::fp8_linear_weight_grad"});
  return all;
}

std::vector<std::string> own_names(const ListingMode& mode) {
  std::vector<std::string> names;
  std::ranges::copy_if(mode.names, std::back_inserter(names), [](const std::string& name) {
    return name.starts_with("tessera::") && name != "tessera::redistribute";
  });
  return names;
}

Tensors leaves(const Tensors& tensors, std::size_t count = 3) {
  Tensors all;
  for (const at::Tensor& tensor : tensors) {
    all.push_back(tensor.detach().requires_grad_(all.size() < count));
  }
  return all;
}

Tensors leaves_of(const Function& function, const Tensors& inputs) {
  return leaves(inputs, function.differentiable);
}

/// Shards dimension 0 of all inputs that have the first input's sizes, and replicates the others.
Tensors spread(const Tensors& inputs, const comm::WorldPtr& world) {
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"x"});
  Tensors distributed;
  for (const at::Tensor& input : inputs) {
    const bool split = input.sizes() == inputs.front().sizes();
    distributed.push_back(
        distribute_tensor(input, mesh, {split ? Placement(Shard{0}) : Placement(Replicate{})}));
  }
  return distributed;
}

TEST(FusedOperators, HaveRulesAndAreSeenByOperatorModes) {
  const auto ruled = ruled_operators();
  const std::set<std::string_view> rules(ruled.begin(), ruled.end());
  for (const Function& function : functions()) {
    const Tensors distributed = spread(function.inputs, comm::fake_world(0, 2));
    for (const Tensors& inputs : {function.inputs, distributed}) {
      ListingMode mode;
      const OperatorModeScope scope(mode);
      function.run(leaves_of(function, inputs)).sum().backward();
      EXPECT_EQ(own_names(mode), function.operators);
    }
    for (const std::string& name : function.operators) {
      EXPECT_TRUE(rules.contains(name)) << name;
    }
  }
}

TEST(FusedOperators, ComputeShapesWithoutValues) {
  for (const Function& function : functions()) {
    const auto sizes = function.run(function.inputs).sizes().vec();
    Tensors meta;
    for (const at::Tensor& input : function.inputs) {
      meta.push_back(input.to(at::kMeta));
    }
    for (const Tensors& inputs : {meta, spread(meta, comm::meta_world(1, 2)), function.inputs}) {
      const Tensors leaves = leaves_of(function, inputs);
      std::optional<kernels::FakeMode> fake;
      if (!inputs[0].is_meta()) {
        fake.emplace();
      }
      const at::Tensor result = function.run(leaves);
      EXPECT_EQ(result.sizes().vec(), sizes) << function.name;
      result.sum().backward();
      EXPECT_EQ(leaves[0].grad().sizes(), leaves[0].sizes()) << function.name;
    }
  }
}

TEST(FusedOperators, RefuseSecondDerivativesAndSecondBackwards) {
  for (const Function& function : functions()) {
    const Tensors leaves = leaves_of(function, function.inputs);
    at::Tensor sum = function.run(leaves).sum();
    EXPECT_ERROR(torch::autograd::grad({sum}, {leaves[0]}, {}, std::nullopt, /*create_graph=*/true),
                 std::string(function.name) + " cannot be differentiated twice");
    if (function.inputs.size() > 1) {
      sum = function.run(leaves).sum();
      sum.backward();
      EXPECT_ANY_THROW(sum.backward()) << function.name;
    }
  }
}

TEST(FusedOperators, RunInInferenceMode) {
  for (const Function& function : functions()) {
    const at::Tensor expected = function.run(function.inputs);
    const c10::InferenceMode inference;
    EXPECT_TRUE(function.run(function.inputs).equal(expected)) << function.name;
    const Tensors distributed = spread(function.inputs, comm::fake_world(0, 1));
    EXPECT_TRUE(local_tensor(function.run(distributed)).equal(expected)) << function.name;
  }
}

TEST(Attention, EqualsOneRankWithSplitBatchAndHeads) {
  for (const std::int64_t kv_heads : {4, 2}) {
    expect_attention_of_parts(
        {values({3, 4, 5, 8}), values({3, kv_heads, 5, 8}, 1), values({3, kv_heads, 5, 8}, 2)},
        [](const Tensors& t) {
          return detail::attention(t[0], t[1], t[2], /*causal=*/true, {}, 0);
        });
  }
}

// Attention to several ranges of keys is computed by one kernel call per range and then merged. The
// result must equal attention to all keys. CUDA's kernels: attention_kernels_test.cpp.

using at::SDPBackend;

constexpr double kHidden = -std::numeric_limits<double>::infinity();

/// Computes attention by its formula: softmax(scores + mask) times values. `mask`: (queries, keys).
at::Tensor attend(const Tensors& t, const at::Tensor& mask) {
  const std::int64_t group = t[0].size(1) / t[1].size(1);
  const at::Tensor scores = t[0].matmul(t[1].repeat_interleave(group, 1).transpose(2, 3)) /
                            std::sqrt(static_cast<double>(t[0].size(3)));
  return (scores + mask).softmax(-1).matmul(t[2].repeat_interleave(group, 1));
}

/// Inputs of attention to 14 keys: the first 4 have a mask, 5 have none, 5 have a causal mask.
struct Parts {
  Tensors inputs{values({2, 6, 5, 8}), values({2, 3, 14, 8}, 1), values({2, 3, 14, 8}, 2)};
  at::Tensor edge = at::full({5, 4}, kHidden, at::kDouble).tril(-2);
  at::Tensor mask = at::cat(
      {edge, at::zeros({5, 5}, at::kDouble), at::full({5, 5}, kHidden, at::kDouble).triu(1)}, 1);
  std::vector<std::pair<std::int64_t, detail::SeenKeys>> blocks{
      {0, {false, edge}}, {4, {}}, {9, {true}}};

  Tensors of(std::int64_t first, const detail::SeenKeys& seen) const {
    const std::int64_t count = seen.mask.defined() ? 4 : 5;
    return {inputs[0], inputs[1].narrow(2, first, count), inputs[2].narrow(2, first, count)};
  }
};

TEST(AttentionPart, MergesToFullAttentionWithEveryKernel) {
  const Parts parts;
  const Tensors mine = leaves(parts.inputs);
  // Each query must attend to at least one of the first 4 keys.
  ASSERT_TRUE(parts.mask.slice(1, 0, 4).isfinite().any(1).all().item<bool>());
  const at::Tensor expected = attend(mine, parts.mask);
  const at::Tensor grad = values(expected.sizes(), 3);
  expected.backward(grad);
  for (const SDPBackend backend : {SDPBackend::flash_attention, SDPBackend::efficient_attention,
                                   SDPBackend::cudnn_attention, SDPBackend::math}) {
    const detail::AttentionKernel kernel{backend, backend != SDPBackend::flash_attention};
    detail::AttentionPart merged;
    for (const auto& [first, seen] : parts.blocks) {
      const Tensors t = parts.of(first, seen);
      detail::AttentionPart part = detail::attention_part(kernel, t[0], t[1], t[2], seen);
      EXPECT_EQ(part.log_sum_exp.sizes(), expected.sizes().slice(0, 3));
      if (merged.out.defined()) {
        detail::merge(merged, part);
      } else {
        merged = part;
      }
    }
    EXPECT_TRUE(merged.out.allclose(expected, 1e-10, 1e-12)) << static_cast<int>(backend);
    at::Tensor of_q = at::zeros_like(mine[0]);
    Tensors of_k, of_v;
    for (const auto& [first, seen] : parts.blocks) {
      const Tensors t = parts.of(first, seen);
      const auto [q, k, v] =
          detail::attention_part_backward(kernel, grad, t[0], t[1], t[2], merged, seen);
      of_q += q;
      of_k.push_back(k);
      of_v.push_back(v);
    }
    EXPECT_TRUE(of_q.allclose(mine[0].grad(), 1e-10, 1e-12)) << static_cast<int>(backend);
    EXPECT_TRUE(at::cat(of_k, 2).allclose(mine[1].grad(), 1e-10, 1e-12));
    EXPECT_TRUE(at::cat(of_v, 2).allclose(mine[2].grad(), 1e-10, 1e-12));
  }
}

using Offsets = std::vector<std::int64_t>;

struct Calls {
  Offsets firsts;
  std::int64_t window;
  int kernels, masked;
  std::int64_t batch = 1;
  Offsets documents = {};
};

/// Runs attention of 6 queries to 12 keys. Expects the numbers of kernel calls in `c`.
void expect_calls(const Calls& c) {
  const at::Tensor q = values({c.batch, 2, 6, 8}).requires_grad_();
  const at::Tensor kv = values({c.batch, 2, 12, 8}, 1).requires_grad_();
  std::map<std::string, int> kernels, masked;
  const kernels::FakeMode fake(c10::DeviceType::CPU, [&](const kernels::FakeCall& call) {
    if (call.name.starts_with("aten::_scaled_dot_product_flash_attention_for_cpu")) {
      ++kernels[call.name];
      const std::size_t mask = call.name.ends_with("backward") ? 8 : 5;
      masked[call.name] += call.arguments[mask].isNone() ? 0 : 1;
    }
  });
  detail::chunked_attention(q, kv, kv, c.firsts, c.window, c.documents).sum().backward();
  ASSERT_EQ(kernels.size(), 2U);
  for (const auto& [name, count] : kernels) {
    EXPECT_EQ(count, c.kernels) << name << " with a window of " << c.window;
    EXPECT_EQ(masked[name], c.masked) << name << " with a window of " << c.window;
  }
}

/// Adjacent chunks, such as at positions 3 and 6, are not merged: each takes two kernel calls.
TEST(ChunkedAttention, CallsTheKernelTwicePerLaterChunk) {
  for (const Calls& c : {Calls{{0, 9}, 0, 3, 0}, Calls{{3, 6}, 0, 4, 0}, Calls{{6}, 0, 2, 0},
                         Calls{{0}, 0, 1, 0}, Calls{{3, 9}, 3, 2, 2}, Calls{{3, 9}, 4, 4, 2},
                         Calls{{3, 9}, 5, 6, 2}, Calls{{3, 9}, 12, 4, 0}}) {
    expect_calls(c);
  }
}

TEST(ChunkedAttention, EqualsMaskedAttentionWithAndWithoutFlash) {
  const Tensors mine =
      leaves({values({2, 4, 6, 8}), values({2, 2, 12, 8}, 1), values({2, 2, 12, 8}, 2)});
  const at::Tensor positions = at::tensor({2, 3, 4, 9, 10, 11}), keys = at::arange(12);
  for (const std::int64_t window : {0, 2, 5}) {
    const at::Tensor back = positions.unsqueeze(1) - keys;
    const at::Tensor hidden = back.lt(0).logical_or(back.ge(window > 0 ? window : 12));
    const at::Tensor mask = at::zeros({6, 12}, at::kDouble).masked_fill(hidden, kHidden);
    const Tensors theirs = leaves(mine);
    const at::Tensor expected = attend(theirs, mask);
    expected.square().sum().backward();
    for (const bool flash : {true, false}) {
      at::globalContext().setSDPUseFlash(flash);
      const Tensors own = leaves(mine);
      const at::Tensor result = detail::chunked_attention(own[0], own[1], own[2], {2, 9}, window);
      result.square().sum().backward();
      at::globalContext().setSDPUseFlash(true);
      EXPECT_TRUE(result.allclose(expected, 1e-10, 1e-12)) << window << flash;
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(own[i].grad().allclose(theirs[i].grad(), 1e-10, 1e-12)) << window << i;
      }
    }
  }
}

TEST(ChunkedAttention, CallsTheKernelForEachDocument) {
  // The first sequence has documents [0, 3), [3, 10), [10, 12); the second has [0, 10), [10], [11].
  expect_calls({{2, 9}, 0, 12, 0, 2, {0, 3, 10, 12, 22, 23, 24}});
}

TEST(ChunkedAttention, EqualsOneRankWithSplitBatchAndHeads) {
  expect_attention_of_parts(
      {values({3, 4, 6, 8}), values({3, 2, 12, 8}, 1), values({3, 2, 12, 8}, 2)},
      [](const Tensors& t) { return detail::chunked_attention(t[0], t[1], t[2], {3, 9}, 7); });
  expect_attention_of_parts(
      {values({3, 4, 6, 8}), values({3, 2, 12, 8}, 1), values({3, 2, 12, 8}, 2)},
      [](const Tensors& t) {
        return detail::chunked_attention(t[0], t[1], t[2], {3, 9}, 4, {0, 5, 12, 24, 27, 28, 36});
      },
      {Replicate{}, Shard{1}});
}

TEST(ChunkedAttention, RefusesInvalidChunksAndDocuments) {
  const at::Tensor two = values({2, 2, 6, 8}), keys = values({2, 2, 12, 8});
  for (const Offsets& wrong :
       {Offsets{0, 12}, {0, 3, 12, 20}, {1, 12, 24}, {0, 13, 24}, {0, 12, 5, 24}}) {
    EXPECT_ERROR(detail::chunked_attention(two, keys, keys, {0, 6}, 0, wrong), "[2, 2, 12, 8]",
                 "each sequence must begin a document");
  }
  const at::Tensor q = values({1, 2, 6, 8}), kv = values({1, 2, 12, 8});
  EXPECT_ERROR(detail::chunked_attention(q, kv, kv, {0, 10}), "3 queries begins at position 10",
               "12 keys");
  EXPECT_ERROR(detail::chunked_attention(q, kv, kv, {0, 1, 2, 3}), "4 chunks", "divisible");
}

}  // namespace
}  // namespace tessera

// Compares tessera::cross_entropy on logits that are sharded along the vocabulary with libtorch's
// loss on the whole logits. operators_test.cpp tests this operator's layouts; tests/tensor_parallel
// tests how the losses are reduced.

namespace tessera::row_losses_test {
namespace {

using testing::values;

constexpr std::int64_t kTokens = 5;

at::Tensor some_targets(std::int64_t vocabulary) {
  const at::Tensor targets = at::arange(kTokens, at::kLong).mul(3).add(1).remainder(vocabulary);
  targets[2] = -100;
  return targets;
}

struct Outcome {
  at::Tensor losses, gradient;
};

/// Returns libtorch's losses of the whole logits, and the gradient of sum(losses * weights).
Outcome of_libtorch(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weights,
                    const detail::RowLossOptions& options) {
  const at::Tensor leaf = logits.clone().requires_grad_();
  const at::Tensor squares =
      leaf.logsumexp(1).square().masked_fill(targets.eq(options.ignore_index), 0);
  const at::Tensor losses = at::cross_entropy_loss(leaf, targets, {}, at::Reduction::None,
                                                   options.ignore_index, options.label_smoothing) +
                            squares * options.z_loss;
  losses.mul(weights).sum().backward();
  return {losses.detach(), leaf.grad()};
}

struct Split {
  std::vector<std::int64_t> mesh;
  Placements logits, targets;
  std::int64_t vocabulary;
  std::int64_t calls;  ///< number of collectives that each rank calls
};

class CrossEntropyOperator : public ::testing::TestWithParam<Split> {};

TEST_P(CrossEntropyOperator, EqualsLibtorchInAStrictScope) {
  const Split& split = GetParam();
  const at::Tensor logits = values({kTokens, split.vocabulary}).mul(3);
  const at::Tensor targets = some_targets(split.vocabulary);
  const at::Tensor weights = at::arange(1, kTokens + 1, at::kDouble);
  RunRanks(testing::ranks_of(split.mesh), [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh(split.mesh, {"dp", "tp"});
    for (const detail::RowLossOptions& options :
         {detail::RowLossOptions{}, detail::RowLossOptions{-100, 0.2, 0.03},
          detail::RowLossOptions{-100, 0.2, 0.5}, detail::RowLossOptions{-100, 0.3, 0.5},
          detail::RowLossOptions{1, 0, 0}}) {
      const at::Tensor valid = targets.masked_fill(targets.eq(-100), options.ignore_index);
      const Outcome expected = of_libtorch(logits, valid, weights, options);
      const at::Tensor leaf =
          distribute_tensor(logits, mesh, split.logits).tensor().detach().requires_grad_();
      const at::Tensor own = distribute_tensor(valid, mesh, split.targets).tensor();
      const at::Tensor of_rows = distribute_tensor(weights, mesh, split.targets).tensor();
      const StrictScope strict;
      const std::int64_t implicit = implicit_redistributions();
      const comm::TrafficTable before = rank.world()->traffic().table();
      const at::Tensor losses = detail::cross_entropy(leaf, own, options);
      losses.mul(of_rows).backward(at::ones_like(losses));
      EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, split.calls);
      EXPECT_EQ(implicit_redistributions(), implicit);

      EXPECT_CLOSE(losses, expected.losses, 0, 1e-12);
      EXPECT_EQ(DistributedTensor(leaf.grad()).layout(), DistributedTensor(leaf).layout());
      EXPECT_CLOSE(leaf.grad(), expected.gradient, 0, 1e-12);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Splits, CrossEntropyOperator,
    ::testing::Values(Split{{1, 2}, {Replicate{}, Shard{1}}, {Replicate{}, Replicate{}}, 8, 2},
                      Split{{1, 4}, {Replicate{}, Shard{1}}, {Replicate{}, Replicate{}}, 5, 2},
                      Split{{2, 2}, {Shard{0}, Shard{1}}, {Shard{0}, Replicate{}}, 7, 2},
                      Split{{2, 2}, {Shard{1}, Shard{0}}, {Replicate{}, Shard{0}}, 7, 2},
                      Split{{2, 2}, {Shard{1}, Shard{1}}, {Replicate{}, Replicate{}}, 7, 2},
                      Split{{6, 1}, {Shard{0}, Shard{1}}, {Shard{0}, Replicate{}}, 7, 0},
                      Split{{2, 2}, {Shard{0}, Replicate{}}, {Shard{0}, Replicate{}}, 7, 0},
                      Split{{2, 2}, {Replicate{}, Replicate{}}, {Replicate{}, Replicate{}}, 7, 0}));

TEST_ON_MESH(CrossEntropyOperator, RefusesOtherLayoutsInAStrictScope, {2}, {"tp"}) {
  const at::Tensor logits = values({kTokens, 7}), targets = some_targets(7);
  const at::Tensor expected = detail::cross_entropy(logits, targets);
  const at::Tensor columns = distribute_tensor(logits, mesh, {Shard{1}});
  const at::Tensor terms = distribute_tensor(logits, mesh, {Partial{}});
  const at::Tensor rows = distribute_tensor(targets, mesh, {Shard{0}});
  const auto both = [&] {
    return std::vector{testing::full_tensor(detail::cross_entropy(columns, rows)),
                       testing::full_tensor(detail::cross_entropy(terms, rows))};
  };
  for (const at::Tensor& losses : both()) {
    EXPECT_TRUE(losses.allclose(expected, 0, 1e-12));
  }
  const StrictScope strict;
  const std::string refusal = "tessera::cross_entropy needs its inputs redistributed";
  EXPECT_ERROR(detail::cross_entropy(columns, rows), refusal);
  EXPECT_ERROR(detail::cross_entropy(terms, rows), refusal);
  EXPECT_ERROR(detail::cross_entropy(columns, targets), "argument 1, [5], is plain");
}

TEST(CrossEntropyOperator, RefusesInvalidTargetsAndOptions) {
  const at::Tensor logits = values({2, 3}), targets = at::tensor({0, 2}, at::kLong);
  EXPECT_ERROR(detail::cross_entropy(logits, targets.add(1)), "outside the vocabulary [0, 3)");
  EXPECT_ERROR(detail::cross_entropy(logits, targets.sub(1)), "outside the vocabulary [0, 3)");
  EXPECT_ERROR(detail::cross_entropy(logits, targets.to(at::kInt)), "must be int64, but are Int");
  EXPECT_ERROR(detail::cross_entropy(logits, targets[0]), "but the sizes are [2, 3] and []");
  EXPECT_ERROR(detail::cross_entropy(logits, targets, {-100, 2, 0}), "label_smoothing is 2");
  EXPECT_ERROR(detail::cross_entropy(logits, targets, {-100, 0, -1}), "z_loss is -1");
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    const at::Tensor split = distribute_tensor(logits, mesh, {Shard{1}});
    const ReplicationScope same;
    EXPECT_ERROR(detail::cross_entropy(split, targets.add(1)), "outside the vocabulary [0, 3)");
    EXPECT_ERROR(detail::cross_entropy(split, targets[0]), "but the sizes are [2, 3] and []");
  });
}

}  // namespace
}  // namespace tessera::row_losses_test
