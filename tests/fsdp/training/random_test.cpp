// Dropout and the random operators of at:: in a model that is sharded by FSDP and tensor
// parallelism: the loss and the gradients are those of one rank with all rows.

#include "tessera/dtensor/random.h"
#include "fsdp/training/random_model.h"
#include "tessera/nn/functional.h"
#include "testing/distributed.h"

namespace tessera::fsdp {
namespace {

using namespace drawing;

class RandomOnMeshes : public ::testing::TestWithParam<RandomMesh> {};

TEST_P(RandomOnMeshes, DropsByModulesAsOneRankDoes) {
  expect_as_alone(GetParam(), kModules, {5});
}

TEST_P(RandomOnMeshes, DropsByOperatorsAsOneRankDoes) {
  expect_as_alone(GetParam(), everywhere(), {5});
}

TEST_P(RandomOnMeshes, DropsInAttentionAsOneRankDoes) {
  expect_as_alone(GetParam(), kAttention, {5});
}

TEST_P(RandomOnMeshes, DrawsTheSameInARecomputation) {
  expect_as_alone(GetParam(), everywhere(), {5}, Checkpointing::kBlocks);
  expect_as_alone(GetParam(), kModules, {5}, Checkpointing::kBlocks);
  expect_as_alone(GetParam(), with_one_key(), {5}, Checkpointing::kBlocks);
}

// Each forward's batch is what its ranks are given, one after another.
TEST_P(RandomOnMeshes, DrawsAnewForEachMicroBatch) {
  expect_as_alone(GetParam(), everywhere(), {5, 5});
  expect_as_alone(GetParam(), kModules, {5, 5});
}

// A rank that had no rows has counted its calls.
TEST_P(RandomOnMeshes, DrawsAsOneRankAfterAForwardWithoutRows) {
  expect_as_alone(GetParam(), everywhere(), {1, 5});
  expect_as_alone(GetParam(), kModules, {1, 5});
  expect_as_alone(GetParam(), kAttention, {1, 5});
}

INSTANTIATE_TEST_SUITE_P(All, RandomOnMeshes,
                         ::testing::Values(RandomMesh{"dp2", {2}, {"dp"}},
                                           RandomMesh{"dp3", {3}, {"dp"}},
                                           RandomMesh{"tp2", {2}, {"tp"}},
                                           RandomMesh{"tp4", {4}, {"tp"}},
                                           RandomMesh{"dp2_tp2", {2, 2}, {"dp", "tp"}},
                                           RandomMesh{"dp2_tp2_sp", {2, 2}, {"dp", "tp"}, Shard{0}},
                                           RandomMesh{"tp4_sp", {4}, {"tp"}, Shard{0}}),
                         [](const auto& info) { return info.param.name; });

/// nn's fused functions between a part and what is drawn for it: (tokens, inner), by heads.
at::Tensor dropped_behind_functions(const at::Tensor& x) {
  const at::Tensor heads = x.view({x.size(0), 1, x.size(1) / kHeadDim, kHeadDim});
  const at::Tensor normed = nn::rms_norm(nn::silu_mul(heads, heads), {}, 1e-2);
  const at::Tensor turned =
      nn::rotary_embedding(normed, at::full({1, kHeadDim}, 0.6F), at::full({1, kHeadDim}, 0.8F));
  return at::dropout(nn::dropout(turned, 0.2, {17, 4}), 0.4, true).view(x.sizes());
}

TEST(RandomNumbers, BehindTheFunctionsOfNnAreThoseOfOneRank) {
  for (const RandomMesh& mesh :
       {RandomMesh{"tp2", {2}, {"tp"}}, RandomMesh{"dp2_tp2", {2, 2}, {"dp", "tp"}}}) {
    SCOPED_TRACE(mesh.name);
    expect_as_alone(mesh, {.features = dropped_behind_functions}, {5});
  }
}

class RandomByOperator : public ::testing::TestWithParam<RandomCase> {};

TEST_P(RandomByOperator, DrawsUnderFsdpAsOneRankDoes) {
  expect_as_alone({"dp3", {3}, {"dp"}}, {.residual = GetParam().residual}, {5});
}

TEST_P(RandomByOperator, DrawsAsOneRankAfterAForwardWithoutRows) {
  expect_as_alone({"dp3", {3}, {"dp"}}, {.residual = GetParam().residual}, {2, 5});
}

TEST_P(RandomByOperator, DrawsOnTwoDimensionsAsOneRankDoes) {
  expect_as_alone({"dp2_tp2", {2, 2}, {"dp", "tp"}}, {.residual = GetParam().residual}, {5});
}

at::Tensor filled(const at::Tensor& x, const std::function<void(const at::Tensor&)>& fill) {
  const at::Tensor values = at::empty_like(x.detach());
  fill(values);
  return x.mul(values);
}

std::vector<RandomCase> random_operators() {
  return {
      {"dropout_in_place",
       [](auto& x) {
         at::Tensor y = x.clone();
         return at::dropout_(y, 0.4, true);
       }},
      {"stock_dropout", [](auto& x) { return torch::nn::Dropout(0.4)->forward(x); }},
      {"native_dropout", [](auto& x) { return std::get<0>(at::native_dropout(x, 0.4, true)); }},
      {"alpha_dropout", [](auto& x) { return at::alpha_dropout(x, 0.4, true); }},
      {"rand_like", [](auto& x) { return x.mul(at::rand_like(x)); }},
      {"randn_like", [](auto& x) { return x.mul(at::randn_like(x)); }},
      {"randint_like", [](auto& x) { return x.mul(at::randint_like(x.detach(), 9)); }},
      {"bernoulli", [](auto& x) { return x.mul(at::bernoulli(x.detach().sigmoid())); }},
      {"bernoulli_p", [](auto& x) { return x.mul(at::bernoulli(x.detach(), 0.5)); }},
      {"uniform_", [](auto& x) { return filled(x, [](auto& t) { t.uniform_(); }); }},
      {"normal_", [](auto& x) { return filled(x, [](auto& t) { t.normal_(); }); }},
      {"exponential_", [](auto& x) { return filled(x, [](auto& t) { t.exponential_(); }); }},
      {"geometric_", [](auto& x) { return filled(x, [](auto& t) { t.geometric_(0.3); }); }},
      {"log_normal_", [](auto& x) { return filled(x, [](auto& t) { t.log_normal_(0, 0.5); }); }},
  };
}

INSTANTIATE_TEST_SUITE_P(All, RandomByOperator, ::testing::ValuesIn(random_operators()),
                         [](const auto& info) { return info.param.name; });

at::Tensor times_categories(const at::Tensor& x) {
  return x.mul(at::multinomial(x.detach().softmax(-1), 1).add(1));
}

/// Operators that make plain tensors: under tp it is not known whether they are parts.
class RandomOfRows : public ::testing::TestWithParam<RandomCase> {};

TEST_P(RandomOfRows, DrawsUnderFsdpAsOneRankDoes) {
  expect_as_alone({"dp3", {3}, {"dp"}}, {.residual = GetParam().residual}, {8});
  expect_as_alone({"dp2", {2}, {"dp"}}, {.residual = GetParam().residual}, {4});
}

std::vector<RandomCase> random_of_rows() {
  return {
      {"drop_path", [](auto& x) { return x.mul(at::rand({x.size(0), 1}).lt(0.6)); }},
      {"noise", [](auto& x) { return x.mul(at::randn({x.size(0), x.size(1)})); }},
      {"for_all_rows", [](auto& x) { return x.mul(at::rand({1, 1})); }},
      {"number", [](auto& x) { return x.mul(at::rand({})); }},
      {"feature_dropout",
       [](auto& x) { return at::feature_dropout(x.unsqueeze(2), 0.4, true).squeeze(2); }},
      {"multinomial", times_categories},
      {"integers", [](auto& x) { return x.mul(at::randint(1, 5, {x.size(0), 1})); }},
  };
}

INSTANTIATE_TEST_SUITE_P(All, RandomOfRows, ::testing::ValuesIn(random_of_rows()),
                         [](const auto& info) { return info.param.name; });

TEST(RandomNumbers, ForCategoriesMatchOneRankAfterAForwardWithoutRows) {
  expect_as_alone({"dp3", {3}, {"dp"}}, {.residual = times_categories}, {2, 8});
}

}  // namespace
}  // namespace tessera::fsdp
