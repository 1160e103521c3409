// Reductions that a type does not have: tensors are not made partial with them, neither on request
// nor by operators.

#include "tessera/dtensor/factories.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::full_tensor;

TEST(PartialTensor, RefusesATypeThatLacksItsReduction) {
  using enum ReduceOp;
  const std::vector<std::pair<at::ScalarType, ReduceOp>> refused{
      {at::kBool, kSum},          {at::kBool, kAvg},          {at::kLong, kAvg},
      {at::kComplexDouble, kMax}, {at::kComplexDouble, kMin}, {at::kComplexDouble, kProduct}};
  RunOnMesh({2}, {"x"}, [&](const DeviceMesh& mesh) {
    for (const auto& [refused_type, op] : refused) {
      const at::ScalarType type = refused_type;
      const std::string why = detail::concat("Partial(", to_string(op), ") of ",
                                             c10::toString(type), " has no meaning");
      const auto value = at::ones({4}, type);
      const Placements placements{Partial{op}};
      EXPECT_ERROR(distribute_tensor(value, mesh, placements), why);
      EXPECT_ERROR(distribute_tensor(value, mesh, placements, {.source = 0}), why);
      EXPECT_ERROR(DistributedTensor::from_local(value, mesh, placements), why);
      EXPECT_ERROR(tessera::ones({4}, mesh, placements, type), why);
      const auto x = distribute_tensor(value, mesh, {Shard{0}});
      EXPECT_ERROR(x.redistribute(placements), why);
      EXPECT_ERROR(x.redistribute(placements, {.async = true}), why);
    }
  });
}

TEST(PartialTensor, AcceptsATypeThatHasItsReduction) {
  using enum ReduceOp;
  const std::vector<std::pair<at::ScalarType, std::vector<ReduceOp>>> accepted{
      {at::kBool, {kMax, kMin, kProduct}},
      {at::kLong, {kSum, kMax, kMin, kProduct}},
      {at::kComplexDouble, {kSum, kAvg}},
      {at::kFloat, {kSum, kAvg, kMax, kMin, kProduct}}};
  RunRanks(2, [&](Rank& rank) {
    for (const auto& [type, ops] : accepted) {
      const auto value = at::arange(4).to(type);
      for (const auto op : ops) {
        const auto x = distribute_tensor(value, rank.mesh({2}, {"x"}), {Partial{op}});
        EXPECT_TRUE(at::equal(x.full_tensor(), value)) << value.scalar_type() << to_string(op);
      }
    }
  });
}

TEST(PartialTensor, NeverHoldsProductsOfComplexNumbers) {
  RunRanks(3, [](Rank& rank) {
    const auto value = at::view_as_complex(at::sin(at::arange(20, at::kDouble)).view({5, 2, 2}));
    const auto x = distribute_tensor(value, rank.mesh({3}, {"x"}), {Shard{0}}).tensor().detach();
    EXPECT_TRUE(at::allclose(full_tensor(x.prod(0)), value.prod(0)));
    EXPECT_TRUE(at::allclose(full_tensor(x.prod()), value.prod()));
  });
}

TEST(PartialTensor, IsReducedBeforeAMaximumMeetsComplexNumbers) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const auto value = at::sin(at::arange(4, at::kDouble));
    const auto x = distribute_tensor(value, mesh, {Partial{ReduceOp::kMax}}).tensor();
    const auto z = at::complex(value, value);
    const auto mask = value.gt(0);
    const auto on = [&](const at::Tensor& t) {
      return distribute_tensor(t, mesh, {Replicate{}}).tensor();
    };
    const c10::complex<double> i(0, 1);
    EXPECT_TRUE(at::equal(full_tensor(x + i), value + i));
    EXPECT_TRUE(at::equal(full_tensor(at::where(on(mask), x, on(z))), at::where(mask, value, z)));
  });
}

TEST(PartialTensor, IsReducedBeforeItIsRounded) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const auto halves = at::arange(5, at::kDouble).div(2);
    const auto x = DistributedTensor::from_local(halves, mesh, {Partial{}}).tensor();
    const auto integers = distribute_tensor(at::zeros({5}, at::kLong), mesh, {Partial{}}).tensor();
    integers.copy_(x);
    EXPECT_TRUE(at::equal(full_tensor(integers), at::arange(5)));
  });
}

TEST(PartialTensor, NeverHoldsSumsOfBooleansOfALookup) {
  RunOnMesh({3}, {"x"}, [](const DeviceMesh& mesh) {
    const auto table = at::sin(at::arange(14, at::kDouble)).gt(0).view({7, 2});
    const auto indices = at::tensor({1, 6, 0, 3, 6}, at::kLong);
    const at::Tensor rows = at::embedding(distribute_tensor(table, mesh, {Shard{0}}),
                                          distribute_tensor(indices, mesh, {Replicate{}}));
    EXPECT_TRUE(at::equal(full_tensor(rows), at::embedding(table, indices)));
  });
}

TEST(PartialTensor, NeverHoldsSumsOfBooleans) {
  RunOnMesh({3}, {"x"}, [](const DeviceMesh& mesh) {
    const auto none = at::zeros({6}, at::kBool), ones = at::ones({5}, at::kBool);
    const auto index = at::arange(5);
    const auto on = [&](const at::Tensor& t, const Placement& placement) {
      return distribute_tensor(t, mesh, {placement}).tensor();
    };
    for (const auto& placement : {Placement{Shard{0}}, Placement{Replicate{}}}) {
      const auto x = on(none, placement), i = on(index, Shard{0}), source = on(ones, Shard{0});
      EXPECT_TRUE(
          at::equal(full_tensor(x.index_add(0, i, source)), none.index_add(0, index, ones)));
      EXPECT_TRUE(
          at::equal(full_tensor(x.scatter_add(0, i, source)), none.scatter_add(0, index, ones)));
      EXPECT_TRUE(at::equal(full_tensor(x.index_put({i}, source, true)),
                            none.index_put({index}, ones, true)));
      EXPECT_TRUE(at::equal(full_tensor(on(ones, Shard{0}).index_select(0, i)), ones));
      EXPECT_TRUE(at::equal(full_tensor(on(ones, Shard{0}).gather(0, i)), ones));
      EXPECT_TRUE(at::equal(full_tensor(on(ones, Shard{0}).take(i)), ones));
    }
  });
}

}  // namespace
}  // namespace tessera
