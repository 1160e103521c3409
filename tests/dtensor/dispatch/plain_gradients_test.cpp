// What one rank differentiates of plain and distributed tensors together: the gradient of a plain
// tensor is plain and that of one rank, and so are gradients of gradients.

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "testing/distributed.h"

namespace tessera {
namespace {
namespace plain_gradients {

using testing::values;
using Tensors = std::vector<at::Tensor>;

/// A function that saves a plain and a distributed tensor for its backward.
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

/// A function of one plain leaf and a distributed one of 5 x 4.
struct Mixture {
  std::string name;
  std::vector<std::int64_t> plain;
  std::function<at::Tensor(const at::Tensor& plain, const at::Tensor& split)> compute;
};

at::Tensor copy(const at::Tensor& tensor) {
  return tensor.mul(1.5);
}

const std::vector<Mixture>& mixtures() {
  static const auto rows = [] { return at::tensor({3, 0}, at::kLong); };
  static const std::vector<Mixture> all{
      {"factor", {}, [](auto& p, auto& d) { return p * d; }},
      {"factor_of_one_dimension", {1}, [](auto& p, auto& d) { return d / (p + 3); }},
      {"factor_of_two_dimensions", {1, 1}, [](auto& p, auto& d) { return at::pow(d * d + 1, p); }},
      {"row", {4}, [](auto& p, auto& d) { return (p * d).sin() * p; }},
      {"column", {5, 1}, [](auto& p, auto& d) { return d.sub(p).mul(d).add(p, 2); }},
      {"product_from_the_left", {3, 5}, [](auto& p, auto& d) { return p.mm(d).tanh(); }},
      {"product_from_the_right", {4, 3}, [](auto& p, auto& d) { return d.mm(p).tanh(); }},
      {"linear", {5, 4}, [](auto& p, auto& d) { return at::linear(d, p, p.select(1, 0)); }},
      {"stack", {5, 4}, [](auto& p, auto& d) { return at::stack({p, d, p}).square(); }},
      {"cat", {2, 4}, [](auto& p, auto& d) { return at::cat({d, p, d}).square(); }},
      {"cat_along_columns", {5, 2}, [](auto& p, auto& d) { return at::cat({p, d}, 1).square(); }},
      {"cat_of_nothing", {0, 4}, [](auto& p, auto& d) { return at::cat({p, d}).square(); }},
      {"where", {5, 4}, [](auto& p, auto& d) { return at::where(d > 0, p * p, d * p); }},
      {"where_plain", {5, 4}, [](auto& p, auto& d) { return at::where(p > 0, p * p, d * d); }},
      {"where_number", {}, [](auto& p, auto& d) { return at::where(d > 0, p * p, d * d); }},
      {"in_place_factor", {4}, [](auto& p, auto& d) { return copy(d).mul_(p).square(); }},
      {"in_place_number", {}, [](auto& p, auto& d) { return copy(d).add_(p).square(); }},
      {"in_place_addcmul", {5, 4}, [](auto& p, auto& d) { return copy(d).addcmul_(p, d * p); }},
      {"in_place_of_the_plain_one", {5, 4}, [](auto& p, auto& d) { return copy(p).mul_(d).sin(); }},
      {"copied_to_a_plain_row",
       {5, 4},
       [](auto& p, auto& d) {
         const at::Tensor result = copy(p);
         result.select(0, 1).copy_(d.select(0, 2));
         return result.square() * d;
       }},
      {"copied_to_a_row",
       {4},
       [](auto& p, auto& d) {
         const at::Tensor result = copy(d);
         result.select(0, 1).copy_(p * p);
         return result.square();
       }},
      {"index_put",
       {2, 4},
       [](auto& p, auto& d) { return copy(d).index_put_({rows()}, p * p).square(); }},
      {"index_put_of_a_number",
       {},
       [](auto& p, auto& d) { return copy(d).index_put_({rows()}, p * p).square(); }},
      {"index_add",
       {2, 4},
       [](auto& p, auto& d) { return copy(d).index_add_(0, rows(), p).square(); }},
      {"lists",
       {5, 4},
       [](auto& p, auto& d) {
         const Tensors products = at::_foreach_mul({d, copy(d)}, {p, copy(p)});
         return products[0].square() + products[1];
       }},
      {"own_function", {5, 4}, [](auto& p, auto& d) { return Product::apply(p, d).square(); }},
      {"own_function_of_a_number",
       {1},
       [](auto& p, auto& d) { return Product::apply(p, d).square(); }},
      {"loss", {}, [](auto& p, auto& d) { return p.exp() * d.square().mean() + p; }},
  };
  return all;
}

/// The result, the gradients of both leaves, and those of the sum of their squares.
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

TEST_P(PlainGradient, IsThatOfOneRank) {
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
        EXPECT_TRUE(at::allclose(testing::full_tensor(found[i]), expected[i].detach())) << what;
      }
    }
  });
}

TEST_P(PlainGradient, IsNotTakenForThatOfAllRanksOutsideOfAScope) {
  const Mixture& mixture = GetParam();
  if (mixture.plain == std::vector<std::int64_t>{0, 4}) {
    return;  // nothing differs
  }
  RunRanks(2, [&](Rank& rank) {
    const at::Tensor plain = values(mixture.plain, rank.rank()).requires_grad_();
    const at::Tensor split =
        distribute_tensor(values({5, 4}), rank.mesh({2}, {"x"}), {Shard{0}}).tensor().detach();
    EXPECT_ERROR(mixture.compute(plain, split.requires_grad_()),
                 " mixes distributed tensors with plain ones");
  });
}

INSTANTIATE_TEST_SUITE_P(Mixtures, PlainGradient, ::testing::ValuesIn(mixtures()),
                         [](const auto& info) { return info.param.name; });

}  // namespace plain_gradients
}  // namespace
}  // namespace tessera
