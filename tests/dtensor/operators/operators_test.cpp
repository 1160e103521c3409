// Operators on distributed tensors against the same operators on plain ones: forward and backward,
// every placement of the first input on a 2 x 2 mesh, even and uneven sizes.

#include "operator_case.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::OperatorCase;

class Operators : public ::testing::TestWithParam<OperatorCase> {};

TEST_P(Operators, EqualsOneRank) {
  testing::expect_equals_one_rank(GetParam(), {2, 2});
}

const std::vector<OperatorCase>& cases() {
  static const std::vector<OperatorCase> all{
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
      {"silu_mul", {{7, 5}, {7, 5}}, [](auto& t) { return detail::silu_mul(t[0], t[1]); }},
      {"silu_mul_empty", {{1, 3}, {1, 3}}, [](auto& t) { return detail::silu_mul(t[1], t[0]); }},
      {"own_rms_norm",
       {{7, 3, 5}, {5}},
       [](auto& t) { return detail::rms_norm(t[0], t[1], 1e-5); }},
      {"own_rms_norm_empty",
       {{1, 5}, {5}},
       [](auto& t) { return detail::rms_norm(t[0], t[1], 1e-5); }},
      {"own_rms_norm_no_weight",
       {{7, 5}},
       [](auto& t) { return detail::rms_norm(t[0], {}, 1e-5); }},
      {"own_rms_norm_weight",
       {{5}, {7, 5}},
       [](auto& t) { return detail::rms_norm(t[1], t[0], 1e-5); }},
      {"rotary_embedding",
       {{3, 5, 3, 4}, {5, 4}, {5, 4}},
       [](auto& t) { return detail::rotary_embedding(t[0], t[1].detach(), t[2].detach()); }},
      {"own_dropout", {{7, 5}}, [](auto& t) { return detail::dropout(t[0], 0.4, {1, 2}); }},
      {"own_dropout_empty", {{1, 5}}, [](auto& t) { return detail::dropout(t[0], 0.4, {1, 2}); }},
      {"own_embedding",
       {{7, 4}},
       [](auto& t) {
         at::Tensor index = at::tensor({4, 0, 6, 4, 1}, at::kLong);
         if (tessera::is_distributed(t[0])) {
           index =
               distribute_tensor(index, DistributedTensor(t[0]).mesh(), {Shard{0}, Replicate{}});
         }
         return detail::embedding(t[0], index);
       }},
      {"own_embedding_empty",
       {{1, 4}},
       [](auto& t) {
         const ReplicationScope same;
         return detail::embedding(t[0], at::tensor({0, 0, 0}, at::kLong));
       }},
      {"own_cross_entropy",
       {{7, 5}},
       [](auto& t) {
         const ReplicationScope same;
         return detail::cross_entropy(t[0], at::tensor({4, 0, -100, 3, 1, 1, 2}, at::kLong),
                                      {-100, 0.1, 0.2});
       }},
      {"own_cross_entropy_empty",
       {{1, 3}},
       [](auto& t) {
         const ReplicationScope same;
         return detail::cross_entropy(t[0], at::tensor({2}, at::kLong));
       }},
      {"t", {{7, 5}}, [](auto& t) { return t[0].t().mul(2); }},
      {"view_flat", {{7, 5}}, [](auto& t) { return t[0].view({35}).mul(2); }},
      {"view_split", {{6, 4}}, [](auto& t) { return t[0].view({3, 2, 4}).mul(2); }},
      {"reshape_of_t", {{6, 4}}, [](auto& t) { return t[0].t().reshape({2, 12}); }},
      {"permute", {{2, 3, 5}}, [](auto& t) { return t[0].permute({2, 0, 1}).mul(2); }},
      {"unsqueeze_expand",
       {{7, 5}},
       [](auto& t) { return t[0].unsqueeze(1).expand({7, 3, 5}) * 2; }},
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
      {"cat", {{7, 5}, {2, 5}}, [](auto& t) { return at::cat({t[0], t[1]}, 0); }},
      {"stack", {{7, 5}, {7, 5}}, [](auto& t) { return at::stack({t[0], t[1]}, -1); }},
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
