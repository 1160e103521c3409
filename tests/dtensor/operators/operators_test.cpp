// Compares operators on distributed tensors with the same operators on plain tensors.

#include <random>

#include "operator_case.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "testing/distributed.h"
#include "testing/layouts.h"

namespace tessera::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<std::int64_t>;

/// Expects that a gradient has the layout of its leaf, with Replicate in place of Partial.
void expect_lies_as_leaf(const at::Tensor& gradient, const at::Tensor& leaf) {
  const auto& of_leaf = *DistributedTensor(leaf).layout();
  const auto expected = Layout::intern(of_leaf.mesh_sizes(), of_leaf.dims());
  EXPECT_EQ(DistributedTensor(gradient).layout(), expected) << to_string(of_leaf);
}

Placements replicated(const DeviceMesh& mesh) {
  return Placements(static_cast<std::size_t>(mesh.ndim()), Replicate{});
}

/// Returns the result of `c`, and the gradients of sum(result * weights) with respect to `leaves`.
Tensors value_and_gradients(const OperatorCase& c, const Tensors& leaves) {
  for (const auto& leaf : leaves) {
    leaf.requires_grad_(c.differentiable);
  }
  const auto result = c.run(leaves);
  if (!c.differentiable) {
    return {full_tensor(result)};
  }
  result.mul(beside(result, values(result.sizes().vec(), 3))).sum().backward();
  Tensors outcome{full_tensor(result)};
  for (const auto& leaf : leaves) {
    if (tessera::is_distributed(leaf) && leaf.grad().defined()) {
      expect_lies_as_leaf(leaf.grad(), leaf);
    }
    outcome.push_back(leaf.grad().defined() ? full_tensor(leaf.grad()) : at::zeros({0}));
  }
  return outcome;
}

Tensors inputs_of(const OperatorCase& c) {
  Tensors inputs;
  for (const auto& sizes : c.inputs) {
    inputs.push_back(values(sizes, static_cast<double>(inputs.size())));
  }
  return inputs;
}

void expect_same(const Tensors& found, const Tensors& expected, const std::string& how) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << how << " " << i;
    ASSERT_TRUE(at::allclose(found[i], expected[i], 1e-9, 1e-12, true))
        << (i == 0 ? "value" : "gradient") << " with " << how << "\n"
        << found[i] << "\nexpected\n"
        << expected[i];
  }
}

}  // namespace

at::Tensor beside(const at::Tensor& other, const at::Tensor& tensor) {
  if (!tessera::is_distributed(other)) {
    return tensor;
  }
  const auto& mesh = sharding_spec(other).mesh;
  return distribute_tensor(tensor, mesh, replicated(mesh));
}

void expect_equals_one_rank(const OperatorCase& c, const Sizes& mesh_sizes) {
  const auto expected = value_and_gradients(c, inputs_of(c));
  RunOnMesh(mesh_sizes, {}, [&](const DeviceMesh& mesh) {
    std::mt19937 engine(11);
    for (int i = 0; i < 30; ++i) {
      std::string how;
      Tensors inputs = inputs_of(c);
      for (auto& input : inputs) {
        const auto sizes = input.sizes().vec();
        const auto layout = random_layout(engine, mesh_sizes, sizes, {ReduceOp::kSum});
        how += " " + to_string(*layout);
        input =
            make_distributed(local_part(input, mesh, *layout), ShardingSpec{mesh, layout}, sizes);
      }
      expect_same(value_and_gradients(c, inputs), expected, how);
    }
  });
}

void expect_attention_of_parts(const Tensors& plain, const Attention& attention,
                               const Placements& placements) {
  Tensors whole;
  for (const at::Tensor& x : plain) {
    whole.push_back(x.detach().requires_grad_());
  }
  const at::Tensor expected = attention(whole);
  expected.square().sum().backward();
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    Tensors mine;
    for (const at::Tensor& x : plain) {
      mine.push_back(distribute_tensor(x, mesh, placements).tensor().detach().requires_grad_());
    }
    const StrictScope nothing_moves;
    const at::Tensor result = attention(mine);
    EXPECT_EQ(DistributedTensor(result).placements(), placements);
    result.square().sum().backward();
    EXPECT_CLOSE(result, expected, 1e-9);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_CLOSE(mine[i].grad(), whole[i].grad(), 1e-9) << i;
    }
  });
}

TEST_P(Operators, EqualOneRankOnA1dMesh) {
  expect_equals_one_rank(GetParam(), {4});
}

TEST_P(Operators, EqualOneRankOn2x2) {
  expect_equals_one_rank(GetParam(), {2, 2});
}

TEST_P(Operators, EqualOneRankOn3x2) {
  expect_equals_one_rank(GetParam(), {3, 2});
}

}  // namespace tessera::testing

namespace tessera {
namespace {

using testing::beside;
using testing::OperatorCases;
using testing::Operators;
using Tensors = std::vector<at::Tensor>;

// Dimensions of size 6 or 8 can have interleaved shards. Dimensions of size 5 or 7 cannot.
OperatorCases element_operators() {
  OperatorCases c;
  c.add("add", {{7, 6}, {7, 6}}, [](auto& t) { return t[0] + t[1]; });
  c.add("add_broadcast", {{7, 5}, {5}}, [](auto& t) { return t[0] + t[1]; });
  c.add("mul_broadcast", {{8, 6}, {6}}, [](auto& t) { return t[0] * t[1]; });
  c.add("where", {{7, 6}, {7, 6}}, [](auto& t) { return at::where(t[0] > 0, t[0], t[1]); });
  c.add("in_place", {{7, 5}}, [](auto& t) { return t[0].mul(2).add_(1).mul_(t[0]); });
  c.add("add_in_place", {{8, 6}, {8, 6}}, [](auto& t) { return t[0].clone().add_(t[1]); });
  c.add("empty_shards", {{1, 3}}, [](auto& t) { return at::exp(t[0]).sum(0); });
  return c;
}

OperatorCases matrix_operators() {
  OperatorCases c;
  c.add("mm_with_itself", {{7, 3}}, [](auto& t) { return at::mm(t[0].t(), t[0]); });
  c.add("linear_3d", {{4, 3, 8}, {10, 8}, {10}},
        [](auto& t) { return at::linear(t[0], t[1], t[2]); });
  c.add("bmm", {{3, 4, 6}, {3, 6, 2}}, [](auto& t) { return at::bmm(t[0], t[1]); });
  c.add("sdpa", {{2, 3, 4, 6}, {2, 3, 4, 6}, {2, 3, 4, 6}},
        [](auto& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, true); });
  return c;
}

OperatorCases reductions_and_norms() {
  OperatorCases c;
  c.add("sum_dim", {{7, 6}}, [](auto& t) { return t[0].sum(0); });
  c.add("mean", {{7, 5}}, [](auto& t) { return t[0].mean(); });
  c.add("softmax", {{7, 6}}, [](auto& t) { return t[0].softmax(-1); });
  c.add("cumsum", {{7, 6}}, [](auto& t) { return t[0].cumsum(-1); });
  c.add("layer_norm", {{4, 7, 6}, {6}, {6}},
        [](auto& t) { return at::layer_norm(t[0], {6}, t[1], t[2]); });
  c.add("rms_norm", {{7, 6}, {6}}, [](auto& t) { return at::rms_norm(t[0], {6}, t[1], 1e-5); });
  return c;
}

OperatorCases operators_of_this_library() {
  OperatorCases c;
  c.add("silu_mul", {{7, 6}, {7, 6}}, [](auto& t) { return detail::silu_mul(t[0], t[1]); });
  c.add("silu_mul_empty", {{1, 3}, {1, 3}}, [](auto& t) { return detail::silu_mul(t[1], t[0]); });
  c.add("fp8_linear", {{4, 3, 8}, {10, 8}}, [](auto& t) { return detail::fp8_linear(t[0], t[1]); });
  c.add("fp8_linear_weight", {{7, 6}, {4, 6}},
        [](auto& t) { return detail::fp8_linear(t[1], t[0]); });
  c.add("own_rms_norm", {{7, 4, 6}, {6}},
        [](auto& t) { return detail::rms_norm(t[0], t[1], 1e-5); });
  c.add("own_rms_norm_no_weight", {{7, 5}},
        [](auto& t) { return detail::rms_norm(t[0], {}, 1e-5); });
  c.add("own_rms_norm_weight", {{5}, {7, 5}},
        [](auto& t) { return detail::rms_norm(t[1], t[0], 1e-5); });
  c.add("rotary_embedding", {{3, 5, 6, 4}, {5, 4}, {5, 4}},
        [](auto& t) { return detail::rotary_embedding(t[0], t[1].detach(), t[2].detach()); });
  c.add("rotary_embedding_qk", {{3, 5, 6, 4}, {3, 5, 6, 4}, {5, 4}, {5, 4}}, [](auto& t) {
    const auto [q, k] = detail::rotary_embedding(t[0], t[1], t[2].detach(), t[3].detach());
    return q * k;
  });
  c.add("own_dropout", {{4, 7, 5}}, [](auto& t) { return detail::dropout(t[0], 0.4, {1, 2}, 7); });
  c.add("own_dropout_empty", {{1, 5}}, [](auto& t) { return detail::dropout(t[0], 0.4, {1, 2}); });
  c.add("own_embedding", {{7, 6}}, [](auto& t) {
    at::Tensor index = at::tensor({4, 0, 6, 4, 1}, at::kLong);
    if (tessera::is_distributed(t[0])) {
      Placements split(static_cast<std::size_t>(sharding_spec(t[0]).mesh.ndim()), Replicate{});
      split[0] = Shard{0};
      index = distribute_tensor(index, sharding_spec(t[0]).mesh, split);
    }
    return detail::embedding(t[0], index);
  });
  c.add("own_embedding_empty", {{1, 4}}, [](auto& t) {
    return detail::embedding(t[0], beside(t[0], at::tensor({0, 0, 0}, at::kLong)));
  });
  c.add("own_cross_entropy", {{7, 6}}, [](auto& t) {
    const auto targets = at::tensor({4, 0, -100, 3, 1, 1, 2}, at::kLong);
    return detail::cross_entropy(t[0], beside(t[0], targets), {-100, 0.1, 0.2});
  });
  c.add("own_cross_entropy_empty", {{1, 3}}, [](auto& t) {
    return detail::cross_entropy(t[0], beside(t[0], at::tensor({2}, at::kLong)));
  });
  return c;
}

OperatorCases views_and_parts() {
  OperatorCases c;
  c.add("flatten_twice", {{4, 6, 2}},
        [](auto& t) { return t[0].reshape({24, 2}).reshape({48}).mul(2); });
  c.add("regroup", {{4, 6, 2}}, [](auto& t) { return t[0].reshape({8, 6}).mul(2); });
  c.add("reshape_of_t", {{6, 4}}, [](auto& t) { return t[0].t().reshape({2, 12}); });
  c.add("heads", {{4, 6, 8}}, [](auto& t) {
    return t[0].view({4, 6, 2, 4}).transpose(1, 2).contiguous().reshape({8, 6, 4}).mul(2);
  });
  c.add("permute", {{4, 3, 6}}, [](auto& t) { return t[0].permute({2, 0, 1}).mul(2); });
  c.add("unsqueeze_expand", {{7, 5}},
        [](auto& t) { return t[0].unsqueeze(1).expand({7, 3, 5}) * 2; });
  c.add("select", {{7, 6}}, [](auto& t) { return t[0].select(0, 3).mul(2); });
  c.add("slice", {{7, 6}}, [](auto& t) { return t[0].slice(0, 1, 6).mul(2); });
  c.add("chunk_mul", {{7, 6}}, [](auto& t) {
    auto c = t[0].chunk(2, 1);
    return c[0] * c[1];
  });
  c.add("cat", {{7, 6}, {4, 6}}, [](auto& t) { return at::cat({t[0], t[1]}, 0); });
  c.add("index_select", {{7, 5}}, [](auto& t) {
    return t[0].index_select(0, beside(t[0], at::tensor({4, 0, 2}, at::kLong)));
  });
  c.add("gather", {{7, 3}}, [](auto& t) {
    const auto index = at::tensor({6, 0, 3, 3, 1, 6}, at::kLong).view({2, 3});
    return t[0].gather(0, beside(t[0], index));
  });
  return c;
}

constexpr auto kName = [](const auto& info) { return info.param.name; };

INSTANTIATE_TEST_SUITE_P(Elements, Operators, ::testing::ValuesIn(element_operators()), kName);
INSTANTIATE_TEST_SUITE_P(Matrices, Operators, ::testing::ValuesIn(matrix_operators()), kName);
INSTANTIATE_TEST_SUITE_P(Reductions, Operators, ::testing::ValuesIn(reductions_and_norms()), kName);
INSTANTIATE_TEST_SUITE_P(Own, Operators, ::testing::ValuesIn(operators_of_this_library()), kName);
INSTANTIATE_TEST_SUITE_P(Views, Operators, ::testing::ValuesIn(views_and_parts()), kName);

// With these operators, PyTorch 2.11's DTensor computes wrong results, or hangs. Each case has
// sizes that leave a shard short or empty.

at::Tensor targets(const at::Tensor& logits) {
  return beside(logits, at::tensor({1, 0, -100, 3, 2, -100, 4}, at::kLong));
}

OperatorCases former_defects() {
  OperatorCases c;
  c.add("cross_entropy_ignore_index", {{7, 5}},
        [](auto& t) { return at::cross_entropy_loss(t[0], targets(t[0])); });
  c.add("cross_entropy_weights", {{7, 5}}, [](auto& t) {
    const auto weights = beside(t[0], at::tensor({.1, .2, .3, .4, .5}, at::kDouble));
    return at::cross_entropy_loss(t[0], targets(t[0]), weights);
  });
  c.add("foreach_on_a_list", {{7, 5}}, [](auto& t) {
    const Tensors list{t[0].mul(1)};
    at::_foreach_add_(list, 1.0);
    at::_foreach_mul_(list, 2.0);
    return list[0];
  });
  c.add("assigned_element", {{5}}, [](auto& t) {
    auto copy = t[0].mul(1);
    copy[0] = 1.0;
    return copy;
  });
  c.add("narrow_in_place", {{7, 5}}, [](auto& t) {
    auto copy = t[0].mul(1);
    copy.narrow(0, 0, 2).mul_(3);
    return copy;
  });
  c.add(
      "chunk_in_place", {{7, 5}},
      [](auto& t) {
        auto copy = t[0].mul(1);
        copy.chunk(3, 0)[1].mul_(3);
        return copy;
      },
      false);
  return c;
}

INSTANTIATE_TEST_SUITE_P(KnownDefects, Operators, ::testing::ValuesIn(former_defects()),
                         [](const auto& info) { return info.param.name; });

TEST_ON_MESH(Item, OfPartialAndShardedTensorsIsGlobal, {4}, {"x"}) {
  const StrictScope strict;
  const at::Tensor split = distribute_tensor(at::arange(7, at::kDouble), mesh, {Shard{0}});
  EXPECT_EQ(split.sum().item<double>(), 21);
  EXPECT_EQ(split.max().item<double>(), 6);
  const at::Tensor pending = distribute_tensor(at::full({}, 3.0), mesh, {Partial{}});
  EXPECT_EQ(pending.item<double>(), 3);
  EXPECT_TRUE(pending.is_nonzero());
  EXPECT_TRUE(at::equal(split, split));
}

// PyTorch 2.11's DTensor throws or computes wrong results for these operators on Partial tensors.

using testing::full_tensor;
using testing::values;

TEST_ON_MESH(DifferentPartials, CanBeAddedAndConcatenated, {4}, {"x"}) {
  const auto as = [&](ReduceOp op) -> at::Tensor {
    return distribute_tensor(values({4, 3}), mesh, {Partial{op}});
  };
  EXPECT_CLOSE(as(ReduceOp::kAvg) + as(ReduceOp::kSum), values({4, 3}) * 2);
  EXPECT_CLOSE(as(ReduceOp::kMax) + as(ReduceOp::kMin), values({4, 3}) * 2);
  EXPECT_CLOSE(at::cat({as(ReduceOp::kMax), as(ReduceOp::kSum)}),
               at::cat({values({4, 3}), values({4, 3})}));
}

/// Checks 8 / x and its gradient for a Partial x whose terms differ between ranks.
void check_quotient(const std::function<at::Tensor(const at::Tensor&)>& divide_eight_by) {
  auto plain = values({7, 5}).add(3).requires_grad_();
  const auto expected = 8.0 / plain;
  expected.mul(values({7, 5}, 1)).sum().backward();
  RunOnMesh({4}, {"x"}, [&](Rank& rank, const DeviceMesh& mesh) {
    // The ranks' terms are 0.1, 0.2, 0.3 and 0.4 times the value: none is 0 or the whole value.
    const auto term = plain.detach() * ((rank.rank() + 1) / 10.0);
    const auto leaf = DistributedTensor::from_local(term, mesh, {Partial{}});
    leaf.tensor().requires_grad_();
    ASSERT_EQ(leaf.placements(), Placements{Partial{}});
    const auto found = divide_eight_by(leaf.tensor());
    found.mul(distribute_tensor(values({7, 5}, 1), mesh, {Replicate{}})).sum().backward();
    EXPECT_CLOSE(found.detach(), expected);
    const DistributedTensor gradient(leaf.tensor().grad());
    EXPECT_EQ(gradient.placements(), Placements{Replicate{}});
    EXPECT_TRUE(at::allclose(local_tensor(gradient), plain.grad()));
  });
}

TEST(PartialDivisor, IsReducedBeforeTheDivision) {
  check_quotient([](const at::Tensor& x) { return 8.0 / x; });
  check_quotient([](const at::Tensor& x) { return at::scalar_tensor(8.0, at::kDouble) / x; });
  check_quotient([](const at::Tensor& x) {
    const at::Tensor eight = distribute_tensor(at::scalar_tensor(8.0, at::kDouble),
                                               sharding_spec(x).mesh, {Replicate{}});
    return eight / x;
  });
}

// libtorch chooses strides by a shard's sizes. Shards with one element along a dimension, or none,
// must have the same strides as the shards of other ranks.

at::Tensor place(const at::Tensor& value, Rank& rank, const Placement& placement) {
  return distribute_tensor(value, rank.mesh({rank.size()}, {"x"}), {placement}).tensor().detach();
}

/// The local results are views with gaps, but the operators are no views by their schemas.
TEST_ON_MESH(PartsThatAreNoViews, HaveNoGaps, {2}, {"x"}) {
  const at::Tensor plain = values({2, 6, 4});
  const at::Tensor t = distribute_tensor(plain, mesh, {Shard{1}});
  EXPECT_EQUAL(at::unsafe_chunk(t, 2, 2)[0].flatten(1),
               at::unsafe_chunk(plain, 2, 2)[0].flatten(1));
  EXPECT_EQUAL(at::unsafe_split_with_sizes(t, {1, 3}, 2)[1].reshape({-1}),
               at::unsafe_split_with_sizes(plain, {1, 3}, 2)[1].reshape({-1}));
}

TEST_ON_RANKS(ThinShards, HaveTheSameStridesOnAllRanks, 4) {
  // Shards of sizes [3, 1] and [3, 0] count as contiguous, whatever their strides are.
  const auto x = place(values({5, 3}), rank, Shard{0}).t();
  // The second x + x uses the dispatch cache.
  for (const auto& y : {x.exp(), x + x, x + x, at::where(x > 0, x, -x), x.clone()}) {
    EXPECT_EQ(y.strides(), at::IntArrayRef({5, 1}));
    EXPECT_TRUE(DistributedTensor(y).to_local().is_contiguous());
    EXPECT_EQUAL(y.view({15}), full_tensor(y).reshape({15}));
  }
}

TEST_ON_MESH(ThinShards, HaveGlobalStridesAfterFromLocal, {4}, {"x"}) {
  const auto rows = values({5, 3});
  // The four ranks have 2, 2, 1 and 0 columns of the transposed tensor.
  const auto first = std::min<std::int64_t>(2 * rank.rank(), 5);
  const auto local = rows.slice(0, first, std::min<std::int64_t>(first + 2, 5)).t();
  const auto x =
      DistributedTensor::from_local(local, mesh, {Shard{1}}, std::vector<std::int64_t>{3, 5});
  EXPECT_EQ(x.tensor().strides(), at::IntArrayRef({5, 1}));
  EXPECT_EQUAL(x.tensor().view({15}), rows.t().reshape({15}));
}

TEST_ON_RANKS(ThinShards, HaveTheSameStridesAfterRedistribute, 4) {
  const DistributedTensor x(place(values({5, 3}), rank, Shard{0}).t());
  for (const Placement& target : {Placement{Shard{0}}, Placement{Replicate{}}}) {
    EXPECT_EQ(x.redistribute({target}).tensor().strides(), at::IntArrayRef({5, 1}));
  }
}

TEST_ON_RANKS(ThinShards, HaveGlobalStridesAfterInPlaceTranspose, 3) {
  const auto shards = {std::pair(values({4, 2}), Shard{0}), std::pair(values({2, 5}), Shard{1})};
  for (const auto& [value, placement] : shards) {
    auto x = place(value, rank, placement);
    x.t_();
    EXPECT_EQ(x.strides(), value.t().strides());
    EXPECT_EQUAL(x.flatten(), value.t().flatten());
    x.unsqueeze_(0);
    EXPECT_EQ(x.strides(), value.t().unsqueeze(0).strides());
  }
}

// An operator on lists of tensors must write the same values as calls for the single tensors, and
// must increase the version of each written tensor by one.

const std::vector<Placement> kPlacementsInLists{Replicate{}, Shard{0}, Partial{},
                                                Partial{ReduceOp::kMax}};

/// Returns operators that write to the tensors of a list x. Some also read a list y.
const std::vector<testing::Named<void(Tensors, Tensors)>>& list_writes() {
  static const std::vector<testing::Named<void(Tensors, Tensors)>> all{
      {"add", [](auto x, auto y) { at::_foreach_add_(x, y); }},
      {"add_number", [](auto x, auto) { at::_foreach_add_(x, 2.0); }},
      {"add_numbers",
       [](auto x, auto) { at::_foreach_add_(x, at::ArrayRef<at::Scalar>({1, 2.0})); }},
      {"sqrt", [](auto x, auto) { at::_foreach_sqrt_(x); }},
      {"zero", [](auto x, auto) { at::_foreach_zero_(x); }},
      {"copy", [](auto x, auto y) { at::_foreach_copy_(x, y); }},
      {"addcmul", [](auto x, auto y) { at::_foreach_addcmul_(x, y, y, 0.5); }}};
  return all;
}

TEST_ON_MESH(Foreach, IncreasesVersionsLikeLibtorch, {3}, {"x"}) {
  const auto spread = [&](const at::Tensor& value, const Placement& placement) -> at::Tensor {
    return distribute_tensor(value, mesh, {placement}).tensor().detach();
  };
  for (const auto& [name, run] : list_writes()) {
    const Tensors plain{values({5}).abs(), values({3, 2}).abs()};
    run(plain, {values({5}, 1), values({3, 2}, 1)});
    for (const auto& written : kPlacementsInLists) {
      for (const auto& read : kPlacementsInLists) {
        SCOPED_TRACE(name + to_string(written) + to_string(read));
        const Tensors x{spread(values({5}).abs(), written), spread(values({3, 2}).abs(), written)};
        const Tensors y{spread(values({5}, 1), read), spread(values({3, 2}, 1), read)};
        for (int times : {1, 2}) {  // the second call uses the dispatch cache
          Tensors again{x[0].clone(), x[1].clone()};
          const auto before = again[0]._version();
          run(again, y);
          for (std::size_t i = 0; i < again.size(); ++i) {
            EXPECT_EQ(again[i]._version() - before, 1) << times;
            EXPECT_EQ(local_tensor(again[i])._version(), again[i]._version());
            EXPECT_CLOSE(again[i], plain[i]);
          }
          EXPECT_EQ(y[0]._version(), 0);
        }
      }
    }
  }
}

TEST_ON_MESH(Foreach, WriteToASavedTensorFailsInBackward, {3}, {"x"}) {
  const auto x = distribute_tensor(values({5}), mesh, {Shard{0}}).tensor().detach();
  const auto y = x.requires_grad_().exp();
  {
    const at::NoGradGuard guard;
    at::_foreach_mul_({y}, 2.0);
  }
  EXPECT_THROWN(c10::Error, y.sum().backward(), "modified by an inplace operation");
}

}  // namespace
}  // namespace tessera
