// Tests the sharding rules of attention operators that have only CUDA kernels. This file registers
// CPU kernels with the same kinds of outputs: undefined tensors, sizes as integers and padded
// statistics.

#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "operator_case.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using at::Tensor;

/// The scores of an attention call. Key and value heads are repeated to match the query heads.
struct Scores {
  Tensor key, value;
  Tensor values;
  double scale;

  Scores(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, bool causal)
      : key(k.repeat_interleave(q.size(1) / k.size(1), 1)),
        value(v.repeat_interleave(q.size(1) / v.size(1), 1)),
        scale(1 / std::sqrt(static_cast<double>(q.size(3)))) {
    values = q.matmul(key.transpose(2, 3)) * scale;
    if (bias.defined()) {
      values = values + bias;
    }
    if (causal) {
      const Tensor allowed = at::ones({q.size(2), k.size(2)}, at::kBool).tril();
      values = values.masked_fill(~allowed, -std::numeric_limits<double>::infinity());
    }
  }
};

std::pair<Tensor, Tensor> attend(const Scores& scores) {
  return {scores.values.softmax(-1).matmul(scores.value), scores.values.logsumexp(-1)};
}

Tensor to_kv_heads(const Tensor& gradient, const Tensor& kv) {
  return gradient.unflatten(1, {kv.size(1), -1}).sum(2);
}

/// Returns the gradients of query, key, value and bias. `rows` is the log-sum-exp of each row.
std::array<Tensor, 4> gradients(const Scores& scores, const Tensor& grad, const Tensor& q,
                                const Tensor& k, const Tensor& v, const Tensor& out,
                                const Tensor& rows) {
  const Tensor weights = (scores.values - rows.unsqueeze(-1)).exp();
  const Tensor of_weights = grad.matmul(scores.value.transpose(2, 3));
  const Tensor of_scores = weights * (of_weights - (grad * out).sum(-1, true));
  return {of_scores.matmul(scores.key) * scores.scale,
          to_kv_heads(of_scores.transpose(2, 3).matmul(q) * scores.scale, k),
          to_kv_heads(weights.transpose(2, 3).matmul(grad), v), of_scores};
}

Tensor number() {
  return at::zeros({}, at::kLong);
}

using Forward =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
using Backward = std::tuple<Tensor, Tensor, Tensor>;

Forward flash(const Tensor& q, const Tensor& k, const Tensor& v, double, bool causal, bool,
              std::optional<double>) {
  const auto [out, rows] = attend({q, k, v, {}, causal});
  return {out,      rows,          {}, {}, q.size(2), k.size(2), at::zeros({2}, at::kLong),
          number(), at::empty({0})};
}

Backward flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out, const Tensor& rows, const Tensor& cum_q, const Tensor&,
                        c10::SymInt max_q, c10::SymInt, double, bool causal, const Tensor&,
                        const Tensor&, std::optional<double>) {
  EXPECT_FALSE(cum_q.defined());
  EXPECT_EQ(max_q, q.size(2));
  const auto [of_q, of_k, of_v, of_bias] =
      gradients({q, k, v, {}, causal}, grad, q, k, v, out, rows);
  return {of_q, of_k, of_v};
}

/// As in CUDA's kernel, the last dimension of the log-sum-exp is padded to a multiple of 32.
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k,
                                                     const Tensor& v,
                                                     const std::optional<Tensor>& bias,
                                                     bool statistics, double, bool causal,
                                                     std::optional<double>) {
  const auto [out, rows] = attend({q, k, v, bias.value_or(Tensor()), causal});
  const std::int64_t padded = (q.size(2) + 31) / 32 * 32;
  return {out,
          statistics ? at::constant_pad_nd(rows, {0, padded - q.size(2)}) : rows.slice(2, 0, 0),
          number(), number()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
    const Tensor& out, const Tensor& rows, const Tensor&, const Tensor&, double,
    std::array<bool, 4> wanted, bool causal, std::optional<double>) {
  const auto [of_q, of_k, of_v, of_bias] =
      gradients({q, k, v, bias, causal}, grad, q, k, v, out, rows.slice(2, 0, q.size(2)));
  return {of_q, of_k, of_v, wanted[3] ? of_bias : Tensor()};
}

/// As in CUDA's kernel, the log-sum-exp has a last dimension of size 1.
Forward cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
              bool statistics, double, bool causal, bool, std::optional<double>) {
  const auto [out, rows] = attend({q, k, v, bias.value_or(Tensor()), causal});
  return {out,       statistics ? rows.unsqueeze(-1) : Tensor(),
          {},        {},
          q.size(2), k.size(2),
          number(),  number(),
          {}};
}

Backward cudnn_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out, const Tensor& rows, const Tensor&, const Tensor&,
                        const Tensor& bias, const Tensor&, const Tensor&, c10::SymInt max_q,
                        c10::SymInt, double, bool causal, std::optional<double>) {
  EXPECT_EQ(max_q, q.size(2));
  const auto [of_q, of_k, of_v, of_bias] =
      gradients({q, k, v, bias, causal}, grad, q, k, v, out, rows.squeeze(-1));
  return {of_q, of_k, of_v};
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_scaled_dot_product_flash_attention", &flash);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  library.impl("_scaled_dot_product_efficient_attention", &efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
  library.impl("_scaled_dot_product_cudnn_attention", &cudnn);
  library.impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_backward);
}

struct Kernel {
  std::string name;
  std::function<Tensor(const std::vector<Tensor>&, bool causal)> run;
  bool grouped = true;  ///< `grouped`: allows fewer key-value heads
};

std::ostream& operator<<(std::ostream& out, const Kernel& kernel) {
  return out << kernel.name;
}

bool keeps_statistics(const std::vector<Tensor>& t) {
  return at::GradMode::is_enabled() && t[0].requires_grad();
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all{
      {"flash",
       [](const std::vector<Tensor>& t, bool causal) {
         return std::get<0>(at::_scaled_dot_product_flash_attention(t[0], t[1], t[2], 0, causal));
       }},
      {"efficient",
       [](const std::vector<Tensor>& t, bool causal) {
         return std::get<0>(at::_scaled_dot_product_efficient_attention(
             t[0], t[1], t[2], {}, keeps_statistics(t), 0, causal));
       },
       false},
      {"cudnn", [](const std::vector<Tensor>& t, bool causal) {
         return std::get<0>(at::_scaled_dot_product_cudnn_attention(
             t[0], t[1], t[2], {}, keeps_statistics(t), 0, causal));
       }}};
  return all;
}

class AttentionKernel : public ::testing::TestWithParam<Kernel> {};

TEST_P(AttentionKernel, EqualsOneRankInEveryLayout) {
  for (const bool causal : {false, true}) {
    const testing::OperatorCase c{
        GetParam().name,
        {{3, 4, 5, 8}, {3, 4, 5, 8}, {3, 4, 5, 8}},
        [causal](const std::vector<Tensor>& t) { return GetParam().run(t, causal); }};
    testing::expect_equals_one_rank(c, {2});
    testing::expect_equals_one_rank(c, {2, 2});
  }
}

/// Compares a kernel on distributed tensors with libtorch's attention on plain tensors.
TEST_P(AttentionKernel, CommunicatesNothingForSplitBatchAndHeads) {
  const std::vector<std::int64_t> heads{3, 6, 5, 8}, kv{3, GetParam().grouped ? 2 : 6, 5, 8};
  testing::expect_attention_of_parts(
      {testing::values(heads, 0), testing::values(kv, 1), testing::values(kv, 2)},
      [](const std::vector<Tensor>& t) {
        return tessera::is_distributed(t[0])
                   ? GetParam().run(t, true)
                   : at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, true, {}, true);
      });
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionKernel, ::testing::ValuesIn(kernels()),
                         testing::name_of_case<Kernel>);

}  // namespace
}  // namespace tessera
