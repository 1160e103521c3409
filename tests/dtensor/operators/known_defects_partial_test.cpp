// Pending reductions that PyTorch 2.11's DTensor gets wrong or refuses.

#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::full_tensor;
using testing::values;

TEST(UnlikePartials, AddUpAndJoin) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const auto as = [&](ReduceOp op) -> at::Tensor {
      return distribute_tensor(values({4, 3}), mesh, {Partial{op}});
    };
    EXPECT_TRUE(
        at::allclose(full_tensor(as(ReduceOp::kAvg) + as(ReduceOp::kSum)), values({4, 3}) * 2));
    EXPECT_TRUE(
        at::allclose(full_tensor(as(ReduceOp::kMax) + as(ReduceOp::kMin)), values({4, 3}) * 2));
    EXPECT_TRUE(at::allclose(full_tensor(at::cat({as(ReduceOp::kMax), as(ReduceOp::kSum)})),
                             at::cat({values({4, 3}), values({4, 3})})));
  });
}

/// 8 / x, where x is the sum of unlike terms, forward and backward.
void check_quotient(const std::function<at::Tensor(const at::Tensor&)>& divide_eight_by) {
  auto plain = values({7, 5}).add(3).requires_grad_();
  const auto expected = 8.0 / plain;
  expected.mul(values({7, 5}, 1)).sum().backward();
  RunOnMesh({4}, {"x"}, [&](Rank& rank, const DeviceMesh& mesh) {
    // Terms of 1, 2, 3 and 4 tenths: none is 0, and none is the value.
    const auto term = plain.detach() * ((rank.rank() + 1) / 10.0);
    const auto leaf = DistributedTensor::from_local(term, mesh, {Partial{}});
    leaf.tensor().requires_grad_();
    ASSERT_EQ(leaf.placements(), Placements{Partial{}});
    const auto found = divide_eight_by(leaf.tensor());
    found.mul(distribute_tensor(values({7, 5}, 1), mesh, {Replicate{}})).sum().backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(found.detach()).full_tensor(), expected));
    const DistributedTensor gradient(leaf.tensor().grad());
    EXPECT_EQ(gradient.placements(), Placements{Replicate{}});
    EXPECT_TRUE(at::allclose(local_tensor(gradient), plain.grad()));
  });
}

TEST(PendingReductions, AreReducedBeforeTheyDivide) {
  check_quotient([](const at::Tensor& x) { return 8.0 / x; });
  check_quotient([](const at::Tensor& x) { return at::scalar_tensor(8.0, at::kDouble) / x; });
  check_quotient([](const at::Tensor& x) {
    const at::Tensor eight = distribute_tensor(at::scalar_tensor(8.0, at::kDouble),
                                               sharding_spec(x).mesh, {Replicate{}});
    return eight / x;
  });
}

}  // namespace
}  // namespace tessera
