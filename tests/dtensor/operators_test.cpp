// Operators on distributed tensors against the same operators on plain ones: forward and backward,
// every placement of the first input on a 2 x 2 mesh, even and uneven sizes.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/policy.h"
#include "testing/ranks.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<std::int64_t>;

struct Case {
  std::string name;
  std::vector<Sizes> inputs;
  std::function<at::Tensor(const Tensors&)> run;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

/// Values that are all different, not too large, and of both signs.
at::Tensor values(const Sizes& sizes, int seed) {
  std::int64_t numel = 1;
  for (auto size : sizes) numel *= size;
  return at::sin(at::arange(numel, at::kDouble).mul(1.7).add(seed)).view(sizes);
}

std::vector<Placements> placements_for(std::int64_t ndim) {
  std::vector<Placement> single{Replicate{}, Partial{}};
  for (std::int64_t d = 0; d < ndim; ++d) single.push_back(Shard{d});
  std::vector<Placements> all;
  for (const auto& a : single) {
    for (const auto& b : single) all.push_back({a, b});
  }
  return all;
}

/// A leaf's gradient lies as the leaf, replicated where that is partial.
Placements of_gradient(Placements placements) {
  for (auto& placement : placements) {
    if (is_partial(placement)) placement = Replicate{};
  }
  return placements;
}

at::Tensor whole(const at::Tensor& tensor) {
  return tessera::is_distributed(tensor) ? DistributedTensor(tensor).full_tensor() : tensor;
}

/// The value and the gradients of sum(result * weights).
Tensors value_and_gradients(const Case& c, Tensors inputs, const DeviceMesh* mesh,
                            const Placements& first) {
  Tensors arguments;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto leaf = inputs[i];
    if (mesh != nullptr) {
      const auto placements = i == 0 ? first : Placements{Replicate{}, Replicate{}};
      leaf = distribute_tensor(leaf, *mesh, placements).tensor().detach();
    }
    arguments.push_back(leaf.requires_grad_());
  }
  const auto result = c.run(arguments);
  auto weights = values(result.sizes().vec(), 3);
  if (mesh != nullptr) weights = distribute_tensor(weights, *mesh, {Replicate{}, Replicate{}});
  result.mul(weights).sum().backward();
  Tensors outcome{whole(result.detach())};
  for (const auto& argument : arguments) {
    if (mesh != nullptr && argument.grad().defined()) {
      EXPECT_EQ(to_string(DistributedTensor(argument.grad()).placements()),
                to_string(of_gradient(DistributedTensor(argument).placements())));
    }
    outcome.push_back(argument.grad().defined() ? whole(argument.grad()) : at::zeros({0}));
  }
  return outcome;
}

class Operators : public ::testing::TestWithParam<Case> {};

TEST_P(Operators, EqualsOneRank) {
  const auto& c = GetParam();
  Tensors inputs;
  for (std::size_t i = 0; i < c.inputs.size(); ++i) {
    inputs.push_back(values(c.inputs[i], static_cast<int>(i)));
  }
  auto clones = [&] {
    Tensors copies;
    for (const auto& input : inputs) copies.push_back(input.clone());
    return copies;
  };
  const auto expected = value_and_gradients(c, clones(), nullptr, {});
  RunRanks(4, [&](Rank& rank) {
    const auto mesh = rank.mesh({2, 2}, {"a", "b"});
    for (const auto& placements : placements_for(static_cast<std::int64_t>(c.inputs[0].size()))) {
      const auto found = value_and_gradients(c, clones(), &mesh, placements);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << to_string(placements) << " " << i;
        ASSERT_TRUE(at::allclose(found[i], expected[i], 1e-9, 1e-12))
            << (i == 0 ? "value" : "gradient") << " with " << to_string(placements) << "\n"
            << found[i] << "\nexpected\n"
            << expected[i];
      }
    }
  });
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"add", {{7, 5}, {7, 5}}, [](auto& t) { return t[0] + t[1]; }},
      {"add_broadcast", {{7, 5}, {5}}, [](auto& t) { return t[0] + t[1]; }},
      {"add_scalar", {{7, 5}}, [](auto& t) { return t[0] + 1.5; }},
      {"mul", {{8, 4}, {8, 4}}, [](auto& t) { return t[0] * t[1]; }},
      {"div_by_first", {{7, 5}, {7, 5}}, [](auto& t) { return t[1] / (t[0] + 3); }},
      {"silu", {{7, 5}}, [](auto& t) { return at::silu(t[0]); }},
      {"gelu", {{7, 5}}, [](auto& t) { return at::gelu(t[0]); }},
      {"pow", {{7, 5}}, [](auto& t) { return at::pow(t[0], 2); }},
      {"exp", {{3, 5}}, [](auto& t) { return at::exp(t[0]); }},
      {"where", {{7, 5}, {7, 5}}, [](auto& t) { return at::where(t[0] > 0, t[0], t[1]); }},
      {"mm", {{7, 5}, {5, 3}}, [](auto& t) { return at::mm(t[0], t[1]); }},
      {"mm_right", {{5, 3}, {7, 5}}, [](auto& t) { return at::mm(t[1], t[0]); }},
      {"addmm", {{7, 5}, {3}, {5, 3}}, [](auto& t) { return at::addmm(t[1], t[0], t[2]); }},
      {"linear_3d", {{2, 3, 5}, {4, 5}, {4}}, [](auto& t) { return at::linear(t[0], t[1], t[2]); }},
      {"bmm", {{3, 4, 5}, {3, 5, 2}}, [](auto& t) { return at::bmm(t[0], t[1]); }},
      {"sum", {{7, 5}}, [](auto& t) { return t[0].sum(); }},
      {"sum_dim", {{7, 5}}, [](auto& t) { return t[0].sum(0); }},
      {"mean", {{7, 5}}, [](auto& t) { return t[0].mean(); }},
      {"mean_dim_keep", {{7, 5}}, [](auto& t) { return t[0].mean(-1, true); }},
      {"amax", {{3, 5}}, [](auto& t) { return t[0].amax(0); }},
      {"max_dim", {{3, 5}}, [](auto& t) { return std::get<0>(t[0].max(0)); }},
      {"norm", {{7, 5}}, [](auto& t) { return t[0].norm(); }},
      {"norm_dim", {{7, 5}}, [](auto& t) { return t[0].norm(2, {1}); }},
      {"var", {{7, 5}}, [](auto& t) { return t[0].var(0); }},
      {"softmax", {{7, 5}}, [](auto& t) { return t[0].softmax(-1); }},
      {"log_softmax", {{7, 5}}, [](auto& t) { return t[0].log_softmax(0); }},
      {"layer_norm",
       {{7, 5}, {5}, {5}},
       [](auto& t) { return at::layer_norm(t[0], {5}, t[1], t[2]); }},
      {"rms_norm", {{7, 5}, {5}}, [](auto& t) { return at::rms_norm(t[0], {5}, t[1], 1e-5); }},
      {"t", {{7, 5}}, [](auto& t) { return t[0].t().mul(2); }},
      {"view_flat", {{7, 5}}, [](auto& t) { return t[0].view({35}).mul(2); }},
      {"view_split",
       {{6, 4}},
       [](auto& t) {
         return t[0].view({3, 2, 4}).mul(2);
       }},
      {"reshape_of_t",
       {{6, 4}},
       [](auto& t) {
         return t[0].t().reshape({2, 12});
       }},
      {"permute",
       {{2, 3, 5}},
       [](auto& t) {
         return t[0].permute({2, 0, 1}).mul(2);
       }},
      {"unsqueeze_expand",
       {{7, 5}},
       [](auto& t) {
         return t[0].unsqueeze(1).expand({7, 3, 5}) * 2;
       }},
      {"squeeze", {{5, 1, 3}}, [](auto& t) { return t[0].squeeze().mul(2); }},
      {"select", {{7, 5}}, [](auto& t) { return t[0].select(0, 3).mul(2); }},
      {"slice", {{7, 5}}, [](auto& t) { return t[0].slice(1, 1, 4).mul(2); }},
      {"chunk_mul",
       {{7, 6}},
       [](auto& t) {
         auto c = t[0].chunk(2, 1);
         return c[0] * c[1];
       }},
      {"unbind",
       {{3, 5}},
       [](auto& t) {
         auto c = t[0].unbind(0);
         return c[0] * c[2];
       }},
      {"cat",
       {{7, 5}, {2, 5}},
       [](auto& t) {
         return at::cat({t[0], t[1]}, 0);
       }},
      {"stack",
       {{7, 5}, {7, 5}},
       [](auto& t) {
         return at::stack({t[0], t[1]}, -1);
       }},
      {"clone", {{7, 5}}, [](auto& t) { return t[0].clone(); }},
      {"to_float", {{7, 5}}, [](auto& t) { return t[0].to(at::kFloat).to(at::kDouble).mul(0); }},
      {"tril", {{5, 5}}, [](auto& t) { return t[0].tril(); }},
      {"cumsum", {{7, 5}}, [](auto& t) { return t[0].cumsum(-1); }},
      {"index_select",
       {{7, 5}},
       [](auto& t) {
         auto index = at::tensor({4, 0, 2}, at::kLong);
         if (tessera::is_distributed(t[0])) {
           index =
               distribute_tensor(index, DistributedTensor(t[0]).mesh(), {Replicate{}, Replicate{}});
         }
         return t[0].index_select(0, index);
       }},
      {"masked_fill", {{7, 5}}, [](auto& t) { return t[0].masked_fill(t[0] > 0.5, 2.0); }},
      {"flip", {{7, 5}}, [](auto& t) { return t[0].flip(0); }},
      {"sort", {{7, 5}}, [](auto& t) { return std::get<0>(t[0].sort(0)); }},
      {"mse_loss", {{7, 5}, {7, 5}}, [](auto& t) { return at::mse_loss(t[0], t[1]); }},
      {"smooth_l1", {{7, 5}, {7, 5}}, [](auto& t) { return at::smooth_l1_loss(t[0], t[1]); }},
      {"sdpa",
       {{2, 3, 4, 6}, {2, 3, 4, 6}, {2, 3, 4, 6}},
       [](auto& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, true); }},
      {"in_place", {{7, 5}}, [](auto& t) { return t[0].mul(2).add_(1).mul_(t[0]); }},
      {"in_place_view",
       {{7, 5}},
       [](auto& t) {
         auto y = t[0].mul(2);
         y.t().mul_(3);
         return y.add(1);
       }},
      {"empty_shards", {{1, 3}}, [](auto& t) { return at::exp(t[0]).sum(0); }},
  };
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Operators, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
