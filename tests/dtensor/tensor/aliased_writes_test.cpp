// What is written may be brought to another layout without being moved on some ranks, or on all:
// the same memory with other strides, or nothing to move.

#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

const std::vector<ReduceOp> kEveryReduction{ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax,
                                            ReduceOp::kMin, ReduceOp::kProduct};

TEST(AliasedWrite, ToATransposedViewOnAMeshDimensionOfSizeOneArrives) {
  const auto expected = values({2, 7}).sin();
  RunRanks(3, [&](Rank& rank) {
    for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{1, 3}, {3, 1}}) {
      const auto mesh = rank.mesh(sizes, {"a", "b"});
      for (const auto op : kEveryReduction) {
        for (const auto& placements :
             {Placements{Partial{op}, Shard{1}}, Placements{Shard{1}, Partial{op}}}) {
          const auto x = distribute_tensor(values({2, 7}), mesh, placements).tensor().detach();
          x.movedim(0, -1).sin_();
          EXPECT_TRUE(at::allclose(DistributedTensor(x).full_tensor(), expected))
              << to_string(placements);
        }
      }
    }
  });
}

TEST(AliasedWrite, ToAPartOfAPendingReductionArrives) {
  auto expected = values({1, 5});
  const auto twice = [](const at::Tensor& x) {
    const auto part = x.split(2, -1)[1];
    at::add_out(const_cast<at::Tensor&>(part), part, part);
  };
  twice(expected);
  RunOnMesh({3}, {"x"}, [&](const DeviceMesh& mesh) {
    std::vector<Placement> placements{Replicate{}, Shard{0}, Shard{1}};
    for (const auto op : kEveryReduction) {
      placements.emplace_back(Partial{op});
    }
    for (const auto& placement : placements) {
      const auto x = distribute_tensor(values({1, 5}), mesh, {placement}).tensor().detach();
      twice(x);
      EXPECT_TRUE(at::allclose(DistributedTensor(x).full_tensor(), expected))
          << to_string(placement);
    }
  });
}

// An empty tensor that is reduced stays where it lies, which may be another tensor's memory.
TEST(AliasedWrite, ToAnEmptyPartOfAPendingReductionChangesNoOtherTensor) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    for (const auto op : kEveryReduction) {
      const auto x = distribute_tensor(values({4}), mesh, {Partial{op}}).tensor().detach();
      const auto value = distribute_tensor(at::zeros({2}, at::kDouble), mesh, {Shard{0}});
      at::Tensor part = x.narrow(0, 0, 0);
      at::add_out(part, value, value);
      EXPECT_TRUE(at::equal(DistributedTensor(x).full_tensor(), values({4})));
      EXPECT_TRUE(at::equal(DistributedTensor(part).full_tensor(), at::zeros({2}, at::kDouble)));
    }
  });
}

}  // namespace
}  // namespace tessera
