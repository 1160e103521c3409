#include "tessera/comm/trace.h"
#include "tessera/dtensor/factories.h"
#include "testing/distributed.h"
#include "testing/values.h"

namespace tessera {
namespace {

using testing::counting_values;
using testing::local_part;

const std::vector<Placement>& choices() {
  static const std::vector<Placement> all{Replicate{}, Shard{0}, Shard{1}, Partial{}};
  return all;
}

std::vector<Placements> all_placements() {
  std::vector<Placements> result;
  for (const auto& a : choices()) {
    for (const auto& b : choices()) {
      result.push_back({a, b});
    }
  }
  return result;
}

/// The value of a tensor whose parts are partial is what they sum to.
void expect_value(const DistributedTensor& t, const std::vector<std::int64_t>& sizes,
                  const std::string& what) {
  EXPECT_TRUE(at::equal(t.full_tensor(), counting_values(sizes))) << what;
}

void check_pair(const DeviceMesh& mesh, const Placements& from, const Placements& to,
                const std::vector<std::int64_t>& sizes) {
  const auto what = to_string(from) + " -> " + to_string(to);
  const auto source = to_layout(mesh.shape().sizes(), from, sizes);
  const auto target = to_layout(mesh.shape().sizes(), to, sizes);
  const auto t = DistributedTensor::from_local(local_part(counting_values(sizes), mesh, *source),
                                               ShardingSpec{mesh, source}, sizes);
  const auto moved = t.redistribute(to);
  EXPECT_EQ(moved.placements(), to) << what;
  if (!target->is_partial()) {
    EXPECT_TRUE(at::equal(local_tensor(moved), local_part(counting_values(sizes), mesh, *target)))
        << what;
  }
  expect_value(moved, sizes, what);
}

TEST(Redistribute, ToItsOwnPlacementsIsTheSameTensor) {
  RunRanks(2, [](Rank& rank) {
    const auto t = distribute_tensor(counting_values({5}), rank.mesh({2}, {"x"}), {Shard{0}});
    EXPECT_TRUE(t.redistribute({Shard{0}}).tensor().is_same(t.tensor()));
  });
}

TEST(Redistribute, MakesANewTensor) {
  RunRanks(2, [](Rank& rank) {
    const auto t = distribute_tensor(at::zeros({4}), rank.mesh({2}, {"x"}), {Replicate{}});
    t.redistribute({Shard{0}}).tensor().add_(1);
    EXPECT_TRUE(at::equal(local_tensor(t), at::zeros({4})));
  });
}

TEST(Redistribute, AveragesAPartialAverage) {
  RunOnMesh({4}, {"x"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto local = at::full({3}, static_cast<double>(rank.rank()));
    const auto t = DistributedTensor::from_local(local, mesh, {Partial{ReduceOp::kAvg}});
    EXPECT_TRUE(at::equal(t.full_tensor(), at::full({3}, 1.5)));
    EXPECT_TRUE(at::equal(t.redistribute({Shard{0}}).full_tensor(), at::full({3}, 1.5)));
  });
}

TEST(Redistribute, KeepsIntegersExactThroughPartial) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const auto t = distribute_tensor(at::arange(5), mesh, {Partial{}});
    EXPECT_TRUE(at::equal(t.full_tensor(), at::arange(5)));
  });
}

TEST(Redistribute, GathersOverTwoMeshDimensionsInOneCall) {
  RunOnMesh({2, 2}, {"a", "b"}, [](Rank& rank, const DeviceMesh& mesh) {
    const auto t = distribute_tensor(counting_values({8, 4}), mesh, {Shard{0}, Shard{0}});
    const auto before = rank.world()->traffic().table();
    EXPECT_TRUE(at::equal(t.full_tensor(), counting_values({8, 4})));
    EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 1);
  });
}

TEST(Redistribute, MovesComplexNumbersAndBools) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const auto z = at::complex(counting_values({3, 4}), counting_values({3, 4}).add(1));
    EXPECT_TRUE(at::equal(distribute_tensor(z, mesh, {Shard{0}}).full_tensor(), z));
    EXPECT_TRUE(at::equal(distribute_tensor(z, mesh, {Partial{}}).full_tensor(), z));
    EXPECT_TRUE(at::equal(
        distribute_tensor(z, mesh, {Shard{0}}).redistribute({Shard{1}}).full_tensor(), z));
    const auto odd = at::arange(7).remainder(2).to(at::kBool);
    EXPECT_TRUE(at::equal(distribute_tensor(odd, mesh, {Shard{0}}).full_tensor(), odd));
  });
}

TEST(Redistribute, CommunicatesNothingOnOneRank) {
  RunOnMesh({1, 1}, {"a", "b"}, [](Rank& rank, const DeviceMesh& mesh) {
    for (const auto& from : all_placements()) {
      for (const auto& to : all_placements()) {
        check_pair(mesh, from, to, {3, 2});
      }
    }
    EXPECT_TRUE(rank.world()->traffic().table().empty());
  });
}

TEST(Redistribute, MovesNothingOnTheMetaDevice) {
  const auto mesh = init_device_mesh(comm::fake_world(1, 4), {2, 2}, {"a", "b"});
  const auto meta = at::empty({7, 5}, at::device(at::kMeta));
  const auto t = distribute_tensor(meta, mesh, {Shard{0}, Shard{1}});
  EXPECT_EQ(local_tensor(t).sizes(), (std::vector<std::int64_t>{4, 2}));
  EXPECT_TRUE(t.redistribute({Shard{1}, Replicate{}}).tensor().is_meta());
  EXPECT_EQ(t.full_tensor().sizes(), (std::vector<std::int64_t>{7, 5}));
}

// Shards of 8 and 4 of 12 positions: no list of placements says that.
TEST(Redistribute, ErrorsNameALayoutThatHasNoPlacements) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const auto layout = Layout::intern({2}, {{{3, {0}}, {4, {}}}});
    const auto whole = at::arange(12, at::kFloat);
    EXPECT_ERROR(to_placements(*layout, whole.sizes()), "has no form as a list of placements");
    EXPECT_ERROR(
        DistributedTensor::from_local(whole.slice(0, 0, 6), ShardingSpec{mesh, layout}, {12}),
        "as [3:m0 x 4]");
    const auto x = DistributedTensor::from_local(local_part(whole, mesh, *layout),
                                                 ShardingSpec{mesh, layout}, {12});
    const auto y = distribute_tensor(whole, mesh, {Shard{0}});
    {
      const StrictScope strict;
      EXPECT_ERROR(at::add(x, y), "[3:m0 x 4]");
    }
    EXPECT_TRUE(at::equal(DistributedTensor(at::add(x, y)).full_tensor(), whole + whole));
  });
}

TEST(Redistribute, RefusesAnotherMesh) {
  RunRanks(4, [](Rank& rank) {
    const auto x = distribute_tensor(counting_values({4}), rank.mesh({4}, {"x"}), {Shard{0}});
    const auto mesh = rank.mesh({2, 2}, {"dp", "tp"});
    const at::Tensor y = distribute_tensor(counting_values({4}), mesh, {Shard{0}, Replicate{}});
    EXPECT_ERROR(x.redistribute(mesh, {Shard{0}, Replicate{}}), "x=4", "dp=2, tp=2");
    EXPECT_ERROR(at::add(x.tensor(), y), "aten::add", "x=4", "dp=2, tp=2");
    EXPECT_TRUE(at::equal(x.full_tensor(), counting_values({4})));
  });
}

const std::vector<Placements>& square() {
  static const std::vector<Placements> all{
      {Replicate{}, Replicate{}}, {Shard{0}, Shard{1}},  {Shard{0}, Shard{0}},
      {Replicate{}, Shard{0}},    {Partial{}, Shard{1}}, {StridedShard{0, 2}, Shard{0}},
      {Shard{1}, Replicate{}},    {Partial{}, Partial{}}};
  return all;
}

TEST(Scatter, SpreadsTheValuesOfOneRank) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    for (const auto& placements : square()) {
      const auto own =
          rank.rank() == 2 ? counting_values({7, 5}) : at::full({7, 5}, -1.0, at::kDouble);
      const auto x = distribute_tensor(own, mesh, placements, {.source = 2});
      EXPECT_EQ(x.placements(), placements);
      EXPECT_TRUE(at::equal(x.full_tensor(), counting_values({7, 5}))) << to_string(placements);
    }
    EXPECT_ERROR(distribute_tensor(counting_values({2}), mesh, square()[0], {.source = 4}),
                 "distribute_tensor from 4 of");
  });
}

}  // namespace

// Reductions that a type does not have: tensors are not made partial with them, neither on request
// nor by operators.

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
