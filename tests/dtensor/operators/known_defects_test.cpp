// What PyTorch 2.11's DTensor gets silently wrong or hangs on, one case for each: on a line of four
// ranks, every placement, sizes that leave a shard short or empty.

#include <limits>

#include "operator_case.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::OperatorCase;
using Tensors = std::vector<at::Tensor>;

/// A tensor beside a distributed one: replicated.
at::Tensor beside(const at::Tensor& other, const at::Tensor& tensor) {
  if (!tessera::is_distributed(other)) {
    return tensor;
  }
  return distribute_tensor(tensor, sharding_spec(other).mesh, {Replicate{}});
}

at::Tensor targets(const at::Tensor& logits) {
  return beside(logits, at::tensor({1, 0, -100, 3, 2, -100, 4}, at::kLong));
}

class KnownDefects : public ::testing::TestWithParam<OperatorCase> {};

TEST_P(KnownDefects, AreRightHere) {
  testing::expect_equals_one_rank(GetParam(), {4});
}

const double kInfinity = std::numeric_limits<double>::infinity();

const std::vector<OperatorCase>& cases() {
  static const std::vector<OperatorCase> all{
      {"mse_loss_even", {{8, 4}, {8, 4}}, [](auto& t) { return at::mse_loss(t[0], t[1]); }},
      {"mse_loss", {{7, 7}, {7, 7}}, [](auto& t) { return at::mse_loss(t[0], t[1]); }},
      {"smooth_l1_even", {{8, 4}, {8, 4}}, [](auto& t) { return at::smooth_l1_loss(t[0], t[1]); }},
      {"smooth_l1", {{6, 6}, {6, 6}}, [](auto& t) { return at::smooth_l1_loss(t[0], t[1]); }},
      {"huber", {{8, 4}, {8, 4}}, [](auto& t) { return at::huber_loss(t[0], t[1]); }},
      {"binary_cross_entropy",
       {{8, 4}},
       [](auto& t) {
         return at::binary_cross_entropy(t[0].sigmoid(),
                                         beside(t[0], at::full({8, 4}, 0.3, at::kDouble)));
       }},
      {"norm_inf", {{7, 5}}, [](auto& t) { return t[0].norm(kInfinity); }},
      {"cross_entropy_ignore_index",
       {{7, 5}},
       [](auto& t) { return at::cross_entropy_loss(t[0], targets(t[0])); }},
      {"cross_entropy_weights",
       {{7, 5}},
       [](auto& t) {
         const auto weights = beside(t[0], at::tensor({.1, .2, .3, .4, .5}, at::kDouble));
         return at::cross_entropy_loss(t[0], targets(t[0]), weights);
       }},
      {"division_by_a_matrix", {{7, 5}}, [](auto& t) { return 8.0 / (t[0] + 3); }},
      {"fill", {{7, 5}}, [](auto& t) { return t[0].mul(2).fill_(3); }},
      {"to_int", {{7, 5}}, [](auto& t) { return t[0].mul(9).to(at::kInt).to(at::kDouble); }, false},
      {"to_bool", {{7, 5}}, [](auto& t) { return t[0].to(at::kBool).to(at::kDouble); }, false},
      {"foreach_on_a_list",
       {{7, 5}},
       [](auto& t) {
         const Tensors list{t[0].mul(1)};
         at::_foreach_add_(list, 1.0);
         at::_foreach_mul_(list, 2.0);
         return list[0];
       }},
      {"norm_of_rows_then_sum", {{7, 5}}, [](auto& t) { return t[0].norm(2, {0}).sum(); }},
      {"any_as_a_number",
       {{7, 5}},
       [](auto& t) { return (t[0] > 0).any(0).to(at::kInt).mul(2).sum().to(at::kDouble); },
       false},
      {"any_then_sum",
       {{7, 5}},
       [](auto& t) { return (t[0] > 0.9).any(0).sum().to(at::kDouble); },
       false},
      {"logsumexp_keepdim", {{7, 5}}, [](auto& t) { return t[0].logsumexp(0, true); }},
      {"cumsum_of_last", {{7, 5}}, [](auto& t) { return t[0].cumsum(-1); }},
      {"stack_last", {{7, 5}}, [](auto& t) { return at::stack({t[0], t[0]}, -1); }},
      {"max_with_empty_shard", {{6, 2}}, [](auto& t) { return t[0].max(); }},
      {"amin_with_empty_shard", {{6, 2}}, [](auto& t) { return t[0].amin(0); }},
      {"amax_with_empty_shard", {{6, 2}}, [](auto& t) { return t[0].amax(0); }},
      {"argmax_with_empty_shard",
       {{6, 2}},
       [](auto& t) { return t[0].argmax().to(at::kDouble); },
       false},
      {"argmax_of_columns",
       {{6, 2}},
       [](auto& t) { return t[0].argmax(0).to(at::kDouble); },
       false},
      {"max_dim_with_empty_shard", {{6, 2}}, [](auto& t) { return std::get<0>(t[0].max(0)); }},
      {"squeeze_of_short_shards", {{7, 5}}, [](auto& t) { return t[0].squeeze().mul(2); }},
      {"rms_norm_of_last",
       {{7, 5}, {5}},
       [](auto& t) { return at::rms_norm(t[0], {5}, t[1], 1e-5); }},
      {"cosine_similarity",
       {{7, 5}, {7, 5}},
       [](auto& t) { return at::cosine_similarity(t[0], t[1], -1); }},
      {"prod", {{3, 2}}, [](auto& t) { return t[0].prod(); }},
      {"topk", {{7, 5}}, [](auto& t) { return std::get<0>(t[0].topk(2, 0)); }},
      {"trace", {{5, 5}}, [](auto& t) { return t[0].trace(); }},
      {"embedding_of_rows",
       {{7, 5}},
       [](auto& t) {
         return at::embedding(t[0], beside(t[0], at::tensor({6, 0, 3, 3}, at::kLong)));
       }},
  };
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, KnownDefects, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(Items, OfPendingAndSplitTensorsAreTheWholeValue) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor split = distribute_tensor(at::arange(6, at::kDouble), mesh, {Shard{0}});
    EXPECT_EQ(split.sum().item<double>(), 15);
    EXPECT_EQ(split.max().item<double>(), 5);
    const at::Tensor pending = distribute_tensor(at::full({}, 3.0), mesh, {Partial{}});
    EXPECT_EQ(pending.item<double>(), 3);
    EXPECT_TRUE(pending.is_nonzero());
    EXPECT_TRUE(at::equal(split, split));
  });
}

}  // namespace
}  // namespace tessera
