// Ranks that hold one position of a dimension, or none: what libtorch's kernels make of such a part
// must not make the ranks differ.

#include <algorithm>

#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::full_tensor;
using testing::values;

/// On a line of all ranks: of 5 positions the fourth rank holds none.
at::Tensor place(const at::Tensor& value, Rank& rank, const Placement& placement) {
  return distribute_tensor(value, rank.mesh({rank.size()}, {"x"}), {placement}).tensor().detach();
}

TEST_ON_RANKS(ThinShards, HaveTheSameStridesOnAllRanks, 4) {
  // A part of [3, 1] is contiguous whatever its strides are, and a part of [3, 0] too.
  const auto x = place(values({5, 3}), rank, Shard{0}).t();
  // Also where a call is found again.
  for (const auto& y : {x.exp(), x + x, x + x, at::where(x > 0, x, -x), x.clone()}) {
    EXPECT_EQ(y.strides(), at::IntArrayRef({5, 1}));
    EXPECT_TRUE(DistributedTensor(y).to_local().is_contiguous());
    EXPECT_EQUAL(y.view({15}), full_tensor(y).reshape({15}));
  }
}

TEST_ON_RANKS(ThinShards, KeepTheOrderOfDimensionsWhereAllPartsTellIt, 3) {
  const auto y = place(values({8, 3}), rank, Shard{0}).t().exp();
  EXPECT_EQ(y.strides(), at::IntArrayRef({1, 3}));
}

TEST_ON_MESH(ThinShards, ComeFromLocalTensorsOfOtherStrides, {4}, {"x"}) {
  const auto rows = values({5, 3});
  // torch.chunk: 2, 2, 1 and no rows, as columns.
  const auto first = std::min<std::int64_t>(2 * rank.rank(), 5);
  const auto local = rows.slice(0, first, std::min<std::int64_t>(first + 2, 5)).t();
  const auto x =
      DistributedTensor::from_local(local, mesh, {Shard{1}}, std::vector<std::int64_t>{3, 5});
  EXPECT_EQ(x.tensor().strides(), at::IntArrayRef({5, 1}));
  EXPECT_EQUAL(x.tensor().view({15}), rows.t().reshape({15}));
}

TEST_ON_RANKS(ThinShards, AreRedistributedToTheSameStridesOnAllRanks, 4) {
  const DistributedTensor x(place(values({5, 3}), rank, Shard{0}).t());
  for (const Placement& target : {Placement{Shard{0}}, Placement{Replicate{}}}) {
    EXPECT_EQ(x.redistribute({target}).tensor().strides(), at::IntArrayRef({5, 1}));
  }
}

TEST(ThinShards, TakeABroadcastTermOfAMatrixVectorProduct) {
  const auto matrix = values({5, 6}), vector = values({6});
  for (const auto& term : {values({1}), values({}), values({5})}) {
    RunRanks(4, [&](Rank& rank) {
      for (const auto& placement : {Shard{0}, Shard{1}}) {
        const auto m = place(matrix, rank, placement).requires_grad_();
        const auto t = place(term, rank, Replicate{}).requires_grad_();
        const auto y = at::addmv(t, m, place(vector, rank, Replicate{}), 0.5, 2);
        EXPECT_CLOSE(y, at::addmv(term, matrix, vector, 0.5, 2));
        y.sum().backward();
        EXPECT_CLOSE(t.grad(), at::full_like(term, 2.5 / term.numel()));
        EXPECT_CLOSE(m.grad(), vector.mul(2).expand({5, 6}));
      }
    });
  }
}

TEST_ON_RANKS(ThinShards, TakeAProductWithoutElementsAndABroadcastTerm, 4) {
  const auto matrix = place(values({5, 0}), rank, Shard{0});
  const auto vector = place(values({0}), rank, Replicate{});
  const auto term = place(values({5}), rank, Shard{0});
  EXPECT_EQUAL(at::addmv(term, matrix, vector, 0.5), values({5}).mul(0.5));
}

TEST_ON_RANKS(ThinShards, AddAPartialTermToASumOfNoProducts, 4) {
  const auto term = values({3, 4}), a = values({5, 3, 2}), b = values({5, 2, 4});
  const auto t = place(term, rank, Partial{});
  const auto y = at::addbmm(t, place(a, rank, Shard{0}), place(b, rank, Shard{0}), 0.5, 2);
  EXPECT_CLOSE(y, at::addbmm(term, a, b, 0.5, 2));
}

TEST_ON_RANKS(ThinShards, AreTransposedInPlaceToTheStridesOfTheWhole, 3) {
  const auto shards = {std::pair(values({4, 2}), Shard{0}), std::pair(values({2, 5}), Shard{1})};
  for (const auto& [value, placement] : shards) {
    auto x = place(value, rank, placement);
    x.t_();
    EXPECT_EQ(x.strides(), value.t().strides());
    EXPECT_EQUAL(x.flatten(), value.t().flatten());
    x.unsqueeze_(0);
    EXPECT_EQ(x.strides(), value.t().unsqueeze(0).strides());
  }
}

TEST_ON_MESH(ThinShards, OnThreeMeshDimensionsAreTransposedInPlace, {2, 2, 2}, {"a", "b", "c"}) {
  auto x = distribute_tensor(values({5, 5}), mesh, {Shard{0}, Shard{1}, Shard{1}}).tensor();
  x.transpose_(0, 1);
  EXPECT_EQUAL(x.flatten(0, 1), values({5, 5}).t().flatten());
}

}  // namespace
}  // namespace tessera
