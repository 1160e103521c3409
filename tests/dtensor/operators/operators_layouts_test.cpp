// Operators whose inputs all lie at random: any order of mesh dimensions on a dimension, local
// digits in front, partial, uneven. Forward and backward against plain tensors.

#include <ostream>
#include <random>

#include "tessera/dtensor/detail/fused_operators.h"
#include "testing/case_name.h"
#include "testing/distributed.h"
#include "testing/layouts.h"

namespace tessera {
namespace {

using testing::full_tensor;
using testing::local_part;
using testing::random_layout;
using testing::values;
using Sizes = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

struct Case {
  const char* name;
  std::vector<Sizes> inputs;
  std::function<at::Tensor(const Tensors&)> run;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

/// The value and the gradients of sum(result * weights).
Tensors outcome(const Case& c, Tensors leaves) {
  for (auto& leaf : leaves) {
    leaf.requires_grad_();
  }
  const auto result = c.run(leaves);
  auto weights = values(result.sizes().vec(), 3);
  if (tessera::is_distributed(result)) {
    const auto& mesh = sharding_spec(result).mesh;
    weights = distribute_tensor(weights, mesh, Placements(static_cast<std::size_t>(mesh.ndim())));
  }
  result.mul(weights).sum().backward();
  Tensors out{full_tensor(result.detach())};
  for (const auto& leaf : leaves) {
    out.push_back(full_tensor(leaf.grad()));
  }
  return out;
}

std::vector<Case> cases() {
  return {
      {"add", {{8, 6}, {8, 6}}, [](const Tensors& t) { return t[0] + t[1]; }},
      {"add, uneven", {{7, 5}, {7, 5}}, [](const Tensors& t) { return t[0] + t[1]; }},
      {"mul, broadcast", {{8, 6}, {6}}, [](const Tensors& t) { return t[0] * t[1]; }},
      {"silu", {{7, 6}}, [](const Tensors& t) { return at::silu(t[0]); }},
      {"mm", {{8, 6}, {6, 4}}, [](const Tensors& t) { return at::mm(t[0], t[1]); }},
      {"mm, uneven", {{7, 5}, {5, 3}}, [](const Tensors& t) { return at::mm(t[0], t[1]); }},
      {"addmm",
       {{4}, {8, 6}, {6, 4}},
       [](const Tensors& t) { return at::addmm(t[0], t[1], t[2]); }},
      {"bmm", {{4, 3, 6}, {4, 6, 2}}, [](const Tensors& t) { return at::bmm(t[0], t[1]); }},
      {"linear of three dimensions",
       {{4, 6, 8}, {10, 8}},
       [](const Tensors& t) { return at::linear(t[0], t[1]); }},
      {"sum", {{8, 6}}, [](const Tensors& t) { return t[0].sum(); }},
      {"sum of a dimension", {{8, 6}}, [](const Tensors& t) { return t[0].sum(0); }},
      {"mean, uneven", {{7, 6}}, [](const Tensors& t) { return t[0].mean(0); }},
      {"softmax", {{8, 6}}, [](const Tensors& t) { return at::softmax(t[0], -1); }},
      {"transpose", {{8, 6}}, [](const Tensors& t) { return t[0].t().mul(2); }},
      {"flatten", {{4, 6}}, [](const Tensors& t) { return t[0].reshape({24}).mul(2); }},
      {"flatten, uneven", {{3, 6}}, [](const Tensors& t) { return t[0].reshape({18}).mul(2); }},
      {"unflatten", {{24}}, [](const Tensors& t) { return t[0].reshape({4, 6}).mul(2); }},
      {"unflatten, uneven", {{18}}, [](const Tensors& t) { return t[0].reshape({3, 6}).mul(2); }},
      {"regroup", {{4, 6, 2}}, [](const Tensors& t) { return t[0].reshape({8, 6}).mul(2); }},
      {"flatten twice",
       {{4, 6, 2}},
       [](const Tensors& t) { return t[0].reshape({24, 2}).reshape({48}).mul(2); }},
      {"select", {{8, 6}}, [](const Tensors& t) { return t[0].select(0, 3).mul(2); }},
      {"narrow", {{8, 6}}, [](const Tensors& t) { return t[0].narrow(0, 2, 3).mul(2); }},
      {"cat", {{8, 6}, {4, 6}}, [](const Tensors& t) { return at::cat({t[0], t[1]}, 0); }},
      {"stack", {{8, 6}, {8, 6}}, [](const Tensors& t) { return at::stack({t[0], t[1]}, 1); }},
      {"expand", {{8, 1}}, [](const Tensors& t) { return t[0].expand({8, 6}).mul(2); }},
      {"add in place", {{8, 6}, {8, 6}}, [](const Tensors& t) { return t[0].clone().add_(t[1]); }},
      {"mul in place, uneven",
       {{7, 5}, {5}},
       [](const Tensors& t) { return t[0].clone().mul_(t[1]); }},
      {"layer norm",
       {{4, 6, 8}, {8}, {8}},
       [](const Tensors& t) { return at::layer_norm(t[0], {8}, t[1], t[2]); }},
      {"rms norm",
       {{7, 8}, {8}},
       [](const Tensors& t) { return t[0] * (t[0].pow(2).mean(-1, true) + 1e-5).rsqrt() * t[1]; }},
      {"silu_mul", {{7, 6}, {7, 6}}, [](const Tensors& t) { return detail::silu_mul(t[0], t[1]); }},
      {"own rms norm",
       {{7, 4, 6}, {6}},
       [](const Tensors& t) { return detail::rms_norm(t[0], t[1], 1e-5); }},
      {"rotary embedding",
       {{2, 5, 6, 4}, {5, 4}, {5, 4}},
       [](const Tensors& t) {
         const auto turned = detail::rotary_embedding(t[0], t[1].detach(), t[2].detach());
         return turned + t[1].sum() + t[2].sum();  // so that every leaf has a gradient
       }},
      {"own dropout",
       {{4, 6, 5}},
       [](const Tensors& t) { return detail::dropout(t[0], 0.4, {1, 2}, 7); }},
      {"own embedding",
       {{7, 6}},
       [](const Tensors& t) {
         const ReplicationScope same;
         return detail::embedding(t[0], at::tensor({4, 0, 6, 4, 1}, at::kLong));
       }},
      {"own cross entropy",
       {{5, 7}},
       [](const Tensors& t) {
         const ReplicationScope same;
         return detail::cross_entropy(t[0], at::tensor({4, 0, -100, 6, 1}, at::kLong));
       }},
      {"log softmax, uneven", {{5, 7}}, [](const Tensors& t) { return at::log_softmax(t[0], 1); }},
      {"logsumexp", {{8, 6}}, [](const Tensors& t) { return at::logsumexp(t[0], {1}, true); }},
      {"largest", {{7, 6}}, [](const Tensors& t) { return at::amax(t[0], {0}); }},
      {"norm", {{7, 6}}, [](const Tensors& t) { return t[0].norm(); }},
      {"variance", {{7, 6}}, [](const Tensors& t) { return t[0].var(0); }},
      {"cumulative sum", {{7, 6}}, [](const Tensors& t) { return t[0].cumsum(0); }},
      {"sorted", {{7, 6}}, [](const Tensors& t) { return std::get<0>(t[0].sort(0)); }},
      {"lower triangle", {{8, 6}}, [](const Tensors& t) { return t[0].tril(); }},
      {"where", {{8, 6}, {8, 6}}, [](const Tensors& t) { return at::where(t[0] > 0, t[0], t[1]); }},
      {"permute", {{4, 6, 2}}, [](const Tensors& t) { return t[0].permute({2, 0, 1}).mul(2); }},
      {"squeeze and unsqueeze",
       {{8, 1, 6}},
       [](const Tensors& t) { return t[0].squeeze(1).unsqueeze(0).mul(2); }},
      {"step slice", {{8, 6}}, [](const Tensors& t) { return t[0].slice(0, 1, 8, 2).mul(2); }},
      {"unbind",
       {{3, 8}},
       [](const Tensors& t) {
         const auto rows = t[0].unbind(0);
         return rows[0] * rows[2];
       }},
      {"outer product", {{8}, {6}}, [](const Tensors& t) { return at::outer(t[0], t[1]); }},
      {"einsum",
       {{4, 3, 6}, {6, 2}},
       [](const Tensors& t) { return at::einsum("bsi,io->bso", {t[0], t[1]}); }},
      {"heads",
       {{4, 6, 8}},
       [](const Tensors& t) {
         return t[0].view({4, 6, 2, 4}).transpose(1, 2).contiguous().reshape({8, 6, 4}).mul(2);
       }},
      {"attention",
       {{2, 4, 6, 4}, {2, 4, 6, 4}, {2, 4, 6, 4}},
       [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2]); }},
      {"mean squared error",
       {{7, 5}, {7, 5}},
       [](const Tensors& t) { return at::mse_loss(t[0], t[1]); }},
      {"chunk",
       {{8, 6}},
       [](const Tensors& t) {
         const auto parts = t[0].chunk(2, 1);
         return parts[0] * parts[1];
       }},
  };
}

void check(const Case& c, const Sizes& mesh_sizes) {
  Tensors plain;
  for (const auto& sizes : c.inputs) {
    plain.push_back(values(sizes, static_cast<double>(sizes[0])));
  }
  Tensors leaves;
  for (const auto& value : plain) {
    leaves.push_back(value.clone());
  }
  const auto expected = outcome(c, leaves);
  RunOnMesh(mesh_sizes, {}, [&](const DeviceMesh& mesh) {
    std::mt19937 engine(11);
    for (int i = 0; i < 40; ++i) {
      std::string how = c.name;
      Tensors distributed;
      for (const auto& value : plain) {
        const auto sizes = value.sizes().vec();
        const auto layout = random_layout(engine, mesh_sizes, sizes, /*with_partial=*/true);
        how += " " + to_string(*layout);
        distributed.push_back(
            make_distributed(local_part(value, mesh, *layout), ShardingSpec{mesh, layout}, sizes));
      }
      const auto found = outcome(c, distributed);
      for (std::size_t k = 0; k < expected.size(); ++k) {
        EXPECT_TRUE(at::allclose(found[k], expected[k], 1e-9, 1e-12)) << how << ", outcome " << k;
      }
    }
  });
}

class OperatorsOnRandomLayouts : public ::testing::TestWithParam<Case> {};

TEST_P(OperatorsOnRandomLayouts, AreRightOn2x2) {
  check(GetParam(), {2, 2});
}

TEST_P(OperatorsOnRandomLayouts, AreRightOn3x2) {
  check(GetParam(), {3, 2});
}

INSTANTIATE_TEST_SUITE_P(All, OperatorsOnRandomLayouts, ::testing::ValuesIn(cases()),
                         testing::name_of_case<Case>);

}  // namespace
}  // namespace tessera
