// Zeros that a gradient's formula writes into may get another layout; other tensors may not.
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

/// The gradient of the largest element among all but the first row, which are picked by a split
/// index.
at::Tensor gradient_of_rows(const at::Tensor& x, const at::Tensor& rows) {
  const auto leaf = x.detach().requires_grad_();
  leaf.index_select(0, rows).mul(2).max().backward();
  return leaf.grad();
}

TEST(BackwardZeros, TakesGradientsOfASplitIndex) {
  const auto x = values({8, 5}), rows = at::tensor({1, 2, 3, 4, 4, 5, 6, 7}, at::kLong);
  const auto expected = gradient_of_rows(x, rows);
  RunOnMesh({4}, {"x"}, [&](const DeviceMesh& mesh) {
    const auto found = gradient_of_rows(distribute_tensor(x, mesh, {Replicate{}}),
                                        distribute_tensor(rows, mesh, {Shard{0}}));
    EXPECT_TRUE(at::allclose(DistributedTensor(found).full_tensor(), expected));
    EXPECT_EQ(to_string(DistributedTensor(found).placements()), "[Replicate()]");
  });
}

TEST(BackwardZeros, LeavesATensorThatAHookWritesToAlone) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor sums = distribute_tensor(at::zeros({8, 5}, at::kDouble), mesh, {Replicate{}});
    const at::Tensor rows = distribute_tensor(at::arange(8), mesh, {Shard{0}});
    const at::Tensor leaf =
        distribute_tensor(values({8, 5}), mesh, {Shard{0}}).tensor().detach().requires_grad_();
    const auto twice = leaf * 2;
    twice.register_hook([&](const at::Tensor& gradient) { sums.index_add_(0, rows, gradient); });
    twice.sum().backward();
    EXPECT_EQ(to_string(DistributedTensor(sums).placements()), "[Replicate()]");
    EXPECT_TRUE(at::equal(DistributedTensor(sums).full_tensor(), at::ones({8, 5}, at::kDouble)));
  });
}

TEST(BackwardZeros, IsWrittenOnlyOnceInAnotherLayout) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const at::Tensor rows = distribute_tensor(at::arange(8), mesh, {Shard{0}});
    const at::Tensor leaf =
        distribute_tensor(values({8, 5}), mesh, {Shard{0}}).tensor().detach().requires_grad_();
    const auto twice = leaf * 2;
    twice.register_hook([&](const at::Tensor& gradient) {
      const auto zeros = gradient.new_zeros({9, 5});
      zeros.index_add_(0, rows, gradient).index_add_(0, rows, gradient);
      return zeros.narrow(0, 0, 8);
    });
    twice.sum().backward();
    EXPECT_TRUE(at::equal(DistributedTensor(leaf.grad()).full_tensor(),
                          at::full({8, 5}, 4.0, at::kDouble)));
  });
}

}  // namespace
}  // namespace tessera
