// Dropout inside attention: the same mask on every mesh, in both directions.

#include <array>

#include "tessera/dtensor/random.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::full_tensor;
using testing::values;

// 3 and 5 divide by neither 2 nor 4.
const std::vector<std::int64_t> kSizes{3, 4, 5, 8};

/// The result and the gradients of query, key and value.
using Results = std::array<at::Tensor, 4>;

Results attend(const DeviceMesh& mesh, const Placements& placements, bool causal) {
  manual_seed(11);
  std::array<at::Tensor, 3> inputs;
  for (int i = 0; i < 3; ++i) {
    inputs[static_cast<std::size_t>(i)] =
        distribute_tensor(values(kSizes, i), mesh, placements).tensor().detach().requires_grad_();
  }
  const auto& [query, key, value] = inputs;
  const at::Tensor result =
      at::scaled_dot_product_attention(query, key, value, {}, /*dropout_p=*/0.4, causal);
  result.mul(result).sum().backward();
  return {full_tensor(result.detach()), full_tensor(query.grad()), full_tensor(key.grad()),
          full_tensor(value.grad())};
}

void expect_same(const Results& found, const Results& expected, const char* what) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-9, 1e-12)) << what << ", result " << i;
  }
}

class AttentionDropout : public ::testing::TestWithParam<bool> {};

TEST_P(AttentionDropout, DropsAlikeOnEveryMesh) {
  Results expected;
  RunOnMesh({1}, {"x"}, [&](const DeviceMesh& one) {
    expected = attend(one, {Replicate{}}, GetParam());
    EXPECT_FALSE(at::allclose(
        expected[0], at::scaled_dot_product_attention(values(kSizes, 0), values(kSizes, 1),
                                                      values(kSizes, 2), {}, 0, GetParam())));
  });
  RunOnMesh({4}, {"x"}, [&](Rank& rank, const DeviceMesh& line) {
    expect_same(attend(line, {Replicate{}}, GetParam()), expected, "replicated");
    expect_same(attend(line, {Shard{0}}, GetParam()), expected, "batch");
    expect_same(attend(line, {Shard{1}}, GetParam()), expected, "heads");
    expect_same(attend(line, {Shard{2}}, GetParam()), expected, "sequence");
    const DeviceMesh square = rank.mesh({2, 2}, {"dp", "tp"});
    expect_same(attend(square, {Shard{0}, Shard{1}}, GetParam()), expected, "batch and heads");
  });
}

INSTANTIATE_TEST_SUITE_P(Masks, AttentionDropout, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "causal" : "none"; });

}  // namespace
}  // namespace tessera
