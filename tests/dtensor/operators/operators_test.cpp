// Operators on distributed tensors against the same operators on plain ones.

#include "operator_case.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::beside;
using testing::OperatorCases;
using testing::Operators;

// In 7 x 6 one dimension divides by 2 and may have local digits.
OperatorCases element_operators() {
  OperatorCases c;
  c.add("add", {{7, 6}, {7, 6}}, [](auto& t) { return t[0] + t[1]; });
  c.add("add_broadcast", {{7, 5}, {5}}, [](auto& t) { return t[0] + t[1]; });
  c.add("mul", {{8, 4}, {8, 4}}, [](auto& t) { return t[0] * t[1]; });
  c.add("mul_broadcast", {{8, 6}, {6}}, [](auto& t) { return t[0] * t[1]; });
  c.add("silu", {{7, 6}}, [](auto& t) { return at::silu(t[0]); });
  c.add("where", {{7, 6}, {7, 6}}, [](auto& t) { return at::where(t[0] > 0, t[0], t[1]); });
  c.add("tril", {{7, 6}}, [](auto& t) { return t[0].tril(); });
  c.add("in_place", {{7, 5}}, [](auto& t) { return t[0].mul(2).add_(1).mul_(t[0]); });
  c.add("add_in_place", {{8, 6}, {8, 6}}, [](auto& t) { return t[0].clone().add_(t[1]); });
  c.add("in_place_view", {{7, 5}}, [](auto& t) {
    auto y = t[0].mul(2);
    y.t().mul_(3);
    return y.add(1);
  });
  c.add("empty_shards", {{1, 3}}, [](auto& t) { return at::exp(t[0]).sum(0); });
  return c;
}

OperatorCases matrix_operators() {
  OperatorCases c;
  c.add("mm", {{7, 5}, {5, 3}}, [](auto& t) { return at::mm(t[0], t[1]); });
  c.add("mm_with_itself", {{7, 3}}, [](auto& t) { return at::mm(t[0].t(), t[0]); });
  c.add("linear_3d", {{4, 3, 8}, {10, 8}, {10}},
        [](auto& t) { return at::linear(t[0], t[1], t[2]); });
  c.add("bmm", {{3, 4, 6}, {3, 6, 2}}, [](auto& t) { return at::bmm(t[0], t[1]); });
  c.add("einsum", {{4, 3, 6}, {6, 2}},
        [](auto& t) { return at::einsum("bsi,io->bso", {t[0], t[1]}); });
  c.add("sdpa", {{2, 3, 4, 6}, {2, 3, 4, 6}, {2, 3, 4, 6}},
        [](auto& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, true); });
  return c;
}

OperatorCases reductions_and_norms() {
  OperatorCases c;
  c.add("sum_dim", {{7, 6}}, [](auto& t) { return t[0].sum(0); });
  c.add("mean", {{7, 5}}, [](auto& t) { return t[0].mean(); });
  c.add("mean_dim", {{7, 6}}, [](auto& t) { return t[0].mean(0); });
  c.add("var", {{7, 6}}, [](auto& t) { return t[0].var(0); });
  c.add("softmax", {{7, 6}}, [](auto& t) { return t[0].softmax(-1); });
  c.add("log_softmax", {{7, 6}}, [](auto& t) { return t[0].log_softmax(0); });
  c.add("cumsum", {{7, 6}}, [](auto& t) { return t[0].cumsum(-1); });
  c.add("layer_norm", {{4, 7, 6}, {6}, {6}},
        [](auto& t) { return at::layer_norm(t[0], {6}, t[1], t[2]); });
  c.add("rms_norm", {{7, 6}, {6}}, [](auto& t) { return at::rms_norm(t[0], {6}, t[1], 1e-5); });
  c.add("mse_loss", {{7, 5}, {7, 5}}, [](auto& t) { return at::mse_loss(t[0], t[1]); });
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
  c.add("t", {{7, 6}}, [](auto& t) { return t[0].t().mul(2); });
  c.add("flatten", {{4, 6}}, [](auto& t) { return t[0].view({24}).mul(2); });
  c.add("flatten_twice", {{4, 6, 2}},
        [](auto& t) { return t[0].reshape({24, 2}).reshape({48}).mul(2); });
  c.add("unflatten", {{24}}, [](auto& t) { return t[0].reshape({4, 6}).mul(2); });
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
  c.add("split", {{8, 3}}, [](auto& t) { return t[0].split(3)[1].mul(2); });
  c.add("chunk_mul", {{7, 6}}, [](auto& t) {
    auto c = t[0].chunk(2, 1);
    return c[0] * c[1];
  });
  c.add("cat", {{7, 6}, {4, 6}}, [](auto& t) { return at::cat({t[0], t[1]}, 0); });
  c.add("stack", {{7, 6}, {7, 6}}, [](auto& t) { return at::stack({t[0], t[1]}, -1); });
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

}  // namespace
}  // namespace tessera
