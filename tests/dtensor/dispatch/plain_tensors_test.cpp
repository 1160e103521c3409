#include <ATen/TensorIndexing.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/detail/make_distributed.h"
#include "testing/distributed.h"

namespace tessera {

// Tests operators on a distributed and a plain tensor. Plain tensors that can differ between ranks
// are refused. In a ReplicationScope, gradients of plain tensors equal those on a single rank.

namespace {

using testing::values;

/// Returns a distributed leaf of 5 rows. 5 is not a multiple of the number of ranks.
at::Tensor leaf(const DeviceMesh& mesh, const Placement& placement = Shard{0}) {
  return distribute_tensor(values({5, 3}), mesh, {placement}).tensor().detach().requires_grad_();
}

TEST_ON_MESH(PlainNumber, WithAGradientIsRefusedWithDistributedTensors, {2}, {"dp"}) {
  const at::Tensor penalty = leaf(mesh).square().sum();
  const at::Tensor loss = values({4}).mul(rank.rank() + 1).requires_grad_().mean();
  EXPECT_ERROR(loss + 0.01 * penalty, "aten::add.Tensor mixes",
               "convert the distributed tensor with DistributedTensor(x).full_tensor()",
               "full_tensor(Placements{Partial{ReduceOp::kAvg}})");
  EXPECT_ERROR(penalty * loss.view({1}), "a plain scalar that requires grad may differ");
  EXPECT_NO_THROW((0.5 * penalty / at::full({}, 3.0) + 1).backward());
}

TEST_ON_MESH(PlainNumber, CanBeALiteral, {2}, {"dp"}) {
  const at::Tensor x = leaf(mesh).detach();
  const std::vector<std::function<at::Tensor(at::Tensor)>> functions{
      [](auto t) { return 1 - t * 2.0; },
      [](auto t) { return at::where(t > 0.5, t, 0.25) + at::where(t > 0, -1.0, t); },
      [](auto t) { return at::where(t > 0.5, 1.0, 0.5); },
      [](auto t) { return at::pow(2.0, t.clamp(-0.5, 0.5)).masked_fill(t > 0, 3); },
      [](auto t) { return at::xlogy(t.abs(), 2.0).add_(at::copysign(t, -1.0)); },
      [](auto t) { return t.index_put_({0}, 1.5); },
  };
  for (std::size_t i = 0; i < functions.size(); ++i) {
    const at::Tensor found = functions[i](x.clone());
    EXPECT_CLOSE(found, functions[i](values({5, 3})), 1e-5, 1e-8, true) << i;
  }
}

/// A function of a distributed 5 x 3 tensor `d` and a plain tensor `number`, to be differentiated.
struct NumberCase {
  std::string name;
  std::function<at::Tensor(const at::Tensor& d, const at::Tensor& number)> compute;
};

const std::vector<NumberCase>& number_cases() {
  static const std::vector<NumberCase> all{
      {"aten::mul.Tensor", [](auto& d, auto& n) { return d * n; }},
      {"aten::rsub.Tensor", [](auto& d, auto& n) { return at::rsub(d, n.view({1, 1})); }},
      {"aten::div_.Tensor", [](auto& d, auto& n) { return d.clone().div_(n); }},
      {"aten::where.self", [](auto& d, auto& n) { return at::where(d > 0, n, d); }},
      {"aten::copy_", [](auto& d, auto& n) { return d.clone().copy_(n); }},
      {"aten::masked_fill.Tensor", [](auto& d, auto& n) { return d.masked_fill(d > 0, n); }},
      {"aten::lerp.Tensor", [](auto& d, auto& n) { return d.lerp(d * d, n); }},
      {"aten::quantile", [](auto& d, auto& n) { return at::quantile(d, n / 4, 1); }},
      {"aten::pad_sequence",
       [](auto& d, auto& n) { return at::pad_sequence({d.select(1, 0), n.view({1})}); }},
  };
  return all;
}

at::Tensor number(double value) {
  return at::full({}, value, at::kDouble);
}

TEST_ON_MESH(PlainNumber, WithoutGradientIsAcceptedIfEqualOnAllRanks, {3}, {"dp"}) {
  for (const Placement& placement : {Placement(Shard{0}), Placement(Replicate{})}) {
    const at::Tensor x = leaf(mesh, placement).detach();
    for (const auto& [name, compute] : number_cases()) {
      EXPECT_CLOSE(compute(x, number(1.5)), compute(values({5, 3}), number(1.5))) << name;
    }
  }
}

TEST_ON_MESH(PlainNumber, WithoutGradientIsRefusedIfRanksDiffer, {3}, {"dp"}) {
  const at::Tensor x = leaf(mesh).detach();
  const at::Tensor own = number(rank.rank() == 2 ? 2 : 1);
  for (const NumberCase& each : number_cases()) {
    EXPECT_ERROR(each.compute(x, own), each.name + " requires equal plain tensors on every rank",
                 "differs from rank 0 on ranks 2", "DistributedTensor(x).full_tensor()");
  }
  EXPECT_NO_THROW(x * number(1));
}

TEST_ON_MESH(PlainFactor, HasAPlainFullGradientInAReplicationScope, {3}, {"dp"}) {
  const at::Tensor rows = leaf(mesh).detach();
  const ReplicationScope same_on_every_rank;
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{}, {1}, {3}, {5, 1}}) {
    const at::Tensor factor = at::ones(sizes, at::kDouble).requires_grad_();
    const at::Tensor alone = at::ones(sizes, at::kDouble).requires_grad_();
    for (int step = 0; step < 2; ++step) {
      (factor * rows).square().sum().backward();
      (alone * values({5, 3})).square().sum().backward();
    }
    ASSERT_FALSE(tessera::is_distributed(factor.grad()));
    EXPECT_TRUE(at::allclose(factor.grad(), alone.grad()));
  }
}

/// An autograd function whose backward multiplies by the saved tensor `mask`.
struct Masked : torch::autograd::Function<Masked> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& mask) {
    context->save_for_backward({mask});
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[0], at::Tensor()};
  }
};

TEST_ON_MESH(BackwardHook, RefusesPlainTensorsThatDifferBetweenRanks, {2}, {"dp"}) {
  const at::Tensor x = leaf(mesh);
  for (const at::Tensor& mask : {at::full({5, 3}, rank.rank(), at::kDouble), number(rank.rank())}) {
    const at::Tensor y = x * 2;
    y.register_hook([=](const at::Tensor& gradient) { return gradient * mask; });
    for (const at::Tensor& result : {y, Masked::apply(x, mask)}) {
      EXPECT_ERROR(result.sum().backward(),
                   "aten::mul.Tensor requires equal plain tensors on every rank");
    }
  }
}

TEST_ON_MESH(BackwardHook, AcceptsPlainTensorsEqualOnAllRanks, {2}, {"dp"}) {
  const at::Tensor x = leaf(mesh), factors = values({5, 3}, 1);
  Masked::apply(x, factors).sum().backward();
  Masked::apply(x, number(2)).sum().backward();
  EXPECT_CLOSE(x.grad(), factors + 2);
  const at::Tensor z = leaf(mesh), y = z * 2;
  for (const at::Tensor& tensor : {z, y}) {
    tensor.register_hook([=](const at::Tensor& gradient) { return gradient * factors; });
  }
  y.sum().backward();
  EXPECT_CLOSE(z.grad(), 2 * factors.square());
}

TEST_ON_MESH(Initialiser, OrthogonalAndSparseAreRefusedOnAShardedParameter, {2}, {"dp"}) {
  const at::Tensor w = leaf(mesh);
  const char* const remedy = "initialise parameters before sharding, or with nn::init_weights";
  detail::name_parameter(w, "layer.weight");
  EXPECT_ERROR(torch::nn::init::orthogonal_(w), remedy);
  EXPECT_ERROR(torch::nn::init::sparse_(w, 0.5), remedy);
}

TEST_ON_MESH(Initialiser, ConstantAndRandomFillsWorkOnAShardedParameter, {2}, {"dp"}) {
  const at::Tensor w = leaf(mesh);
  EXPECT_EQUAL(torch::nn::init::eye_(w), at::eye(5, 3, at::kDouble));
  EXPECT_EQUAL(torch::nn::init::constant_(w, 3), at::full({5, 3}, 3.0, at::kDouble));
  for (const auto fill :
       {+[](const at::Tensor& t) { return torch::nn::init::xavier_normal_(t); },
        +[](const at::Tensor& t) { return torch::nn::init::kaiming_uniform_(t); }}) {
    const at::Tensor whole = DistributedTensor(fill(w)).full_tensor();
    EXPECT_FALSE(at::equal(whole[0], whole[4]));
  }
  const at::Tensor kernel =
      distribute_tensor(at::zeros({4, 2, 3}, at::kDouble), mesh, {Shard{0}}).tensor().detach();
  const at::Tensor expected = torch::nn::init::dirac_(at::zeros({4, 2, 3}, at::kDouble));
  EXPECT_EQUAL(torch::nn::init::dirac_(kernel), expected);
}

// Tests first and second derivatives with respect to a plain tensor that is combined with a
// distributed tensor. The derivatives must be plain, and equal to those on one rank.

namespace plain_gradients {

using testing::values;
using Tensors = std::vector<at::Tensor>;

/// An autograd function that saves a plain and a distributed tensor for its backward.
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& plain,
                            const at::Tensor& split) {
    context->save_for_backward({plain, split});
    return plain * split;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const Tensors saved = context->get_saved_variables();
    return {(gradients[0] * saved[1]).sum_to_size(saved[0].sizes()), gradients[0] * saved[0]};
  }
};

struct Mixture {
  std::string name;
  std::vector<std::int64_t> plain;
  std::function<at::Tensor(const at::Tensor& plain, const at::Tensor& split)> compute;
};

at::Tensor copy(const at::Tensor& tensor) {
  return tensor.mul(1.5);
}

std::vector<Mixture> mixtures() {
  static const auto rows = [] { return at::tensor({3, 0}, at::kLong); };
  std::vector<Mixture> all;
  const auto add = [&](const char* name, const std::vector<std::int64_t>& plain, auto compute) {
    all.push_back({name, plain, compute});
  };
  add("factor", {}, [](auto& p, auto& d) { return p * d; });
  add("factor_of_one_dimension", {1}, [](auto& p, auto& d) { return d / (p + 3); });
  add("row", {4}, [](auto& p, auto& d) { return (p * d).sin() * p; });
  add("column", {5, 1}, [](auto& p, auto& d) { return d.sub(p).mul(d).add(p, 2); });
  add("product_from_the_left", {3, 5}, [](auto& p, auto& d) { return p.mm(d).tanh(); });
  add("linear", {5, 4}, [](auto& p, auto& d) { return at::linear(d, p, p.select(1, 0)); });
  add("stack", {5, 4}, [](auto& p, auto& d) { return at::stack({p, d, p}).square(); });
  add("cat", {2, 4}, [](auto& p, auto& d) { return at::cat({d, p, d}).square(); });
  add("cat_of_nothing", {0, 4}, [](auto& p, auto& d) { return at::cat({p, d}).square(); });
  add("where", {5, 4}, [](auto& p, auto& d) { return at::where(d > 0, p * p, d * p); });
  add("in_place_factor", {4}, [](auto& p, auto& d) { return copy(d).mul_(p).square(); });
  add("in_place_of_the_plain_one", {5, 4}, [](auto& p, auto& d) { return copy(p).mul_(d).sin(); });
  add("copied_to_a_plain_row", {5, 4}, [](auto& p, auto& d) {
    const at::Tensor result = copy(p);
    result.select(0, 1).copy_(d.select(0, 2));
    return result.square() * d;
  });
  add("copied_to_a_row", {4}, [](auto& p, auto& d) {
    const at::Tensor result = copy(d);
    result.select(0, 1).copy_(p * p);
    return result.square();
  });
  add("index_put", {2, 4},
      [](auto& p, auto& d) { return copy(d).index_put_({rows()}, p * p).square(); });
  add("index_add", {2, 4},
      [](auto& p, auto& d) { return copy(d).index_add_(0, rows(), p).square(); });
  add("lists", {5, 4}, [](auto& p, auto& d) {
    const Tensors products = at::_foreach_mul({d, copy(d)}, {p, copy(p)});
    return products[0].square() + products[1];
  });
  add("own_function", {5, 4}, [](auto& p, auto& d) { return Product::apply(p, d).square(); });
  add("own_function_of_a_number", {1},
      [](auto& p, auto& d) { return Product::apply(p, d).square(); });
  add("loss", {}, [](auto& p, auto& d) { return p.exp() * d.square().mean() + p; });
  return all;
}

Tensors derivatives(const Mixture& mixture, const at::Tensor& plain, const at::Tensor& split) {
  const Tensors leaves{plain, split};
  const at::Tensor result = mixture.compute(plain, split);
  const Tensors first =
      torch::autograd::grad({result.sum()}, leaves, {}, true, /*create_graph=*/true);
  at::Tensor squares = first[1].square().sum();
  {
    const ReplicationScope both_are_equal_on_all_ranks;
    squares = squares + first[0].square().sum();
  }
  const Tensors second = torch::autograd::grad({squares}, leaves, {}, {}, {}, true);
  return {result, first[0], first[1], second[0], second[1]};
}

class PlainGradient : public ::testing::TestWithParam<Mixture> {};

TEST_P(PlainGradient, EqualsOneRank) {
  const Mixture& mixture = GetParam();
  const at::Tensor p = values(mixture.plain, 0.3), d = values({5, 4});
  const auto leaf = [](const at::Tensor& tensor) { return tensor.clone().requires_grad_(); };
  const Tensors expected = derivatives(mixture, leaf(p), leaf(d));
  const std::vector<Placement> placements{Shard{0}, Shard{1}, Replicate{}};
  RunRanks(3, [&](Rank& rank) {
    for (const Placement& placement : placements) {
      const at::Tensor split =
          distribute_tensor(d.clone(), rank.mesh({3}, {"x"}), {placement}).tensor().detach();
      const at::Tensor plain = leaf(p);
      Tensors found;
      {
        const ReplicationScope same_on_every_rank;
        found = derivatives(mixture, plain, split.requires_grad_());
      }
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const std::string what = to_string(Placements{placement}) + ", " + std::to_string(i);
        ASSERT_EQ(found[i].defined(), expected[i].defined()) << what;
        if (!found[i].defined()) {
          continue;
        }
        EXPECT_TRUE(i == 0 || tessera::is_distributed(found[i]) == (i % 2 == 0)) << what;
        EXPECT_CLOSE(found[i], expected[i].detach()) << what;
      }
    }
  });
}

TEST_P(PlainGradient, IsRefusedOutsideAReplicationScope) {
  const Mixture& mixture = GetParam();
  if (mixture.plain == std::vector<std::int64_t>{0, 4}) {
    return;
  }
  RunRanks(2, [&](Rank& rank) {
    const at::Tensor plain = values(mixture.plain, rank.rank()).requires_grad_();
    const at::Tensor split =
        distribute_tensor(values({5, 4}), rank.mesh({2}, {"x"}), {Shard{0}}).tensor().detach();
    EXPECT_ERROR(mixture.compute(plain, split.requires_grad_()),
                 " mixes distributed tensors with plain tensors");
  });
}

INSTANTIATE_TEST_SUITE_P(Mixtures, PlainGradient, ::testing::ValuesIn(mixtures()),
                         [](const auto& info) { return info.param.name; });

}  // namespace plain_gradients
}  // namespace
}  // namespace tessera
