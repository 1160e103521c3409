#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/factories.h"
#include "testing/distributed.h"
#include "testing/forwarding_communicator.h"

namespace tessera {
namespace {

using testing::counting_values;
using testing::local_part;

TEST_ON_MESH(Redistribute, MakesANewTensorOnlyForDifferentPlacements, {2}, {"x"}) {
  const auto t = distribute_tensor(counting_values({5}), mesh, {Shard{0}});
  EXPECT_TRUE(t.redistribute({Shard{0}}).tensor().is_same(t.tensor()));
  const auto whole = distribute_tensor(at::zeros({4}), mesh, {Replicate{}});
  whole.redistribute({Shard{0}}).tensor().add_(1);
  EXPECT_TRUE(at::equal(local_tensor(whole), at::zeros({4})));
}

TEST_ON_MESH(Redistribute, GathersOverTwoMeshDimensionsInOneCall, {2, 2}, {"a", "b"}) {
  const auto t = distribute_tensor(counting_values({8, 4}), mesh, {Shard{0}, Shard{0}});
  const auto before = rank.world()->traffic().table();
  EXPECT_EQUAL(t, counting_values({8, 4}));
  EXPECT_EQ(comm::total(rank.world()->traffic().since(before)).calls, 1);
}

TEST_ON_MESH(Redistribute, MovesComplexNumbersAndBools, {2}, {"x"}) {
  const auto z = at::complex(counting_values({3, 4}), counting_values({3, 4}).add(1));
  EXPECT_EQUAL(distribute_tensor(z, mesh, {Shard{0}}), z);
  EXPECT_EQUAL(distribute_tensor(z, mesh, {Partial{}}), z);
  EXPECT_EQUAL(distribute_tensor(z, mesh, {Shard{0}}).redistribute({Shard{1}}), z);
  const auto odd = at::arange(7).remainder(2).to(at::kBool);
  EXPECT_EQUAL(distribute_tensor(odd, mesh, {Shard{0}}), odd);
}

TEST_ON_MESH(Redistribute, CommunicatesNothingOnOneRank, {1, 1}, {"a", "b"}) {
  const std::vector<Placement> choices{Replicate{}, Shard{0}, Shard{1}, Partial{}};
  for (const Placement& a : choices) {
    for (const Placement& b : choices) {
      for (const Placement& c : choices) {
        const Placements from{a, b}, to{b, c};
        const auto moved = distribute_tensor(counting_values({3, 2}), mesh, from).redistribute(to);
        EXPECT_EQ(moved.placements(), to);
        EXPECT_EQUAL(moved, counting_values({3, 2})) << to_string(from) << to_string(to);
      }
    }
  }
  EXPECT_TRUE(rank.world()->traffic().table().empty());
}

TEST(Redistribute, CommunicatesNothingOnTheMetaDevice) {
  const auto mesh = init_device_mesh(comm::fake_world(1, 4), {2, 2}, {"a", "b"});
  const auto meta = at::empty({7, 5}, at::device(at::kMeta));
  const auto t = distribute_tensor(meta, mesh, {Shard{0}, Shard{1}});
  EXPECT_EQ(local_tensor(t).sizes(), (std::vector<std::int64_t>{4, 2}));
  EXPECT_TRUE(t.redistribute({Shard{1}, Replicate{}}).tensor().is_meta());
  EXPECT_EQ(t.full_tensor().sizes(), (std::vector<std::int64_t>{7, 5}));
}

// In this layout, the ranks have 8 and 4 of 12 elements, which no list of placements describes.
TEST_ON_MESH(Redistribute, ErrorsPrintLayoutsThatHaveNoPlacements, {2}, {"x"}) {
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
  EXPECT_EQUAL(at::add(x, y), whole + whole);
}

TEST_ON_RANKS(Operators, RefuseTensorsOfTwoMeshes, 4) {
  const auto x = distribute_tensor(counting_values({4}), rank.mesh({4}, {"x"}), {Shard{0}});
  const auto mesh = rank.mesh({2, 2}, {"dp", "tp"});
  const at::Tensor y = distribute_tensor(counting_values({4}), mesh, {Shard{0}, Replicate{}});
  EXPECT_ERROR(at::add(x.tensor(), y), "aten::add", "x=4", "dp=2, tp=2");
  EXPECT_EQUAL(x, counting_values({4}));
}

const std::vector<Placements>& square() {
  static const std::vector<Placements> all{
      {Replicate{}, Replicate{}}, {Shard{0}, Shard{1}},  {Shard{0}, Shard{0}},
      {Replicate{}, Shard{0}},    {Partial{}, Shard{1}}, {StridedShard{0, 2}, Shard{0}},
      {Shard{1}, Replicate{}},    {Partial{}, Partial{}}};
  return all;
}

TEST_ON_MESH(DistributeTensor, ScattersTheValuesOfOneRank, {2, 2}, {"dp", "tp"}) {
  for (const auto& placements : square()) {
    const auto own =
        rank.rank() == 2 ? counting_values({7, 5}) : at::full({7, 5}, -1.0, at::kDouble);
    const auto x = distribute_tensor(own, mesh, placements, 2);
    EXPECT_EQ(x.placements(), placements);
    EXPECT_EQUAL(x, counting_values({7, 5})) << to_string(placements);
  }
  EXPECT_ERROR(distribute_tensor(counting_values({2}), mesh, square()[0], 4),
               "source is 4, outside");
}

// Not every dtype supports every reduction: integers have no average. distribute_tensor(),
// redistribute() and operators must refuse a Partial with an unsupported reduction.

using testing::full_tensor;

TEST(PartialTensor, RefusesTypesWithoutTheReduction) {
  using enum ReduceOp;
  const std::vector<std::pair<at::ScalarType, ReduceOp>> refused{
      {at::kBool, kSum},          {at::kBool, kAvg},          {at::kLong, kAvg},
      {at::kComplexDouble, kMax}, {at::kComplexDouble, kMin}, {at::kComplexDouble, kProduct}};
  RunOnMesh({2}, {"x"}, [&](const DeviceMesh& mesh) {
    for (const auto& [refused_type, op] : refused) {
      const at::ScalarType type = refused_type;
      const std::string why =
          detail::concat("Partial(", to_string(op), ") is not defined for ", c10::toString(type));
      const auto value = at::ones({4}, type);
      const Placements placements{Partial{op}};
      EXPECT_ERROR(distribute_tensor(value, mesh, placements), why);
      EXPECT_ERROR(distribute_tensor(value, mesh, placements, 0), why);
      EXPECT_ERROR(DistributedTensor::from_local(value, mesh, placements), why);
      EXPECT_ERROR(tessera::ones({4}, mesh, placements, type), why);
      const auto x = distribute_tensor(value, mesh, {Shard{0}});
      EXPECT_ERROR(x.redistribute(placements), why);
    }
  });
}

TEST_ON_MESH(PartialTensor, OfMaximumIsReducedBeforeComplexPromotion, {2}, {"x"}) {
  const auto value = at::sin(at::arange(4, at::kDouble));
  const auto x = distribute_tensor(value, mesh, {Partial{ReduceOp::kMax}}).tensor();
  const auto z = at::complex(value, value);
  const auto mask = value.gt(0);
  const auto on = [&](const at::Tensor& t) {
    return distribute_tensor(t, mesh, {Replicate{}}).tensor();
  };
  const c10::complex<double> i(0, 1);
  EXPECT_EQUAL(x + i, value + i);
  EXPECT_EQUAL(at::where(on(mask), x, on(z)), at::where(mask, value, z));
}

TEST_ON_MESH(PartialTensor, IsNeverASumOfBooleans, {3}, {"x"}) {
  const auto none = at::zeros({6}, at::kBool), ones = at::ones({5}, at::kBool);
  const auto index = at::arange(5);
  const auto on = [&](const at::Tensor& t, const Placement& placement) {
    return distribute_tensor(t, mesh, {placement}).tensor();
  };
  for (const auto& placement : {Placement{Shard{0}}, Placement{Replicate{}}}) {
    const auto x = on(none, placement), i = on(index, Shard{0}), source = on(ones, Shard{0});
    EXPECT_EQUAL(x.index_add(0, i, source), none.index_add(0, index, ones));
    EXPECT_EQUAL(x.scatter_add(0, i, source), none.scatter_add(0, index, ones));
    EXPECT_EQUAL(x.index_put({i}, source, true), none.index_put({index}, ones, true));
    EXPECT_EQUAL(on(ones, Shard{0}).index_select(0, i), ones);
    EXPECT_EQUAL(on(ones, Shard{0}).gather(0, i), ones);
    EXPECT_EQUAL(on(ones, Shard{0}).take(i), ones);
  }
}

// An asynchronous redistribution must wait for its collectives when its result is first used.

using comm::CommunicatorPtr;
using comm::WorkPtr;
using Log = std::vector<std::string>;

class LoggedWork final : public comm::Work {
 public:
  LoggedWork(WorkPtr inner, std::string name, Log& log)
      : inner_(std::move(inner)), name_(std::move(name)), log_(log) {}
  void wait() override {
    log_.push_back("wait " + name_);
    inner_->wait();
  }

 private:
  WorkPtr inner_;
  std::string name_;
  Log& log_;
};

/// A process group that logs the start of each collective and each wait for a collective.
class LoggedCommunicator final : public testing::ForwardingCommunicator {
 public:
  LoggedCommunicator(CommunicatorPtr inner, std::string name, Log& log, bool on_device)
      : ForwardingCommunicator(std::move(inner)),
        name_(std::move(name)),
        log_(log),
        on_device_(on_device) {}
  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return logged(inner().all_gather(output, input));
  }
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return logged(inner().all_reduce(tensor, op));
  }
  bool keeps_order_on_device() const override { return on_device_; }

 private:
  WorkPtr logged(WorkPtr work) {
    log_.push_back("start " + name_);
    return std::make_shared<LoggedWork>(std::move(work), name_, log_);
  }

  std::string name_;
  Log& log_;
  bool on_device_;
};

/// Returns a 2 x 2 mesh that logs collectives. `on_device`: result of keeps_order_on_device().
DeviceMesh logged_mesh(Rank& rank, Log& log, bool on_device = false) {
  const int row = rank.rank() / 2, column = rank.rank() % 2;
  const auto dp = rank.world()->group({column, column + 2}, "logged dp");
  const auto tp = rank.world()->group({2 * row, 2 * row + 1}, "logged tp");
  return DeviceMesh::from_groups(rank.world(), {0, 1, 2, 3}, MeshShape({2, 2}, {"dp", "tp"}),
                                 {std::make_shared<LoggedCommunicator>(dp, "dp", log, on_device),
                                  std::make_shared<LoggedCommunicator>(tp, "tp", log, on_device)});
}

const RedistributeOptions kAsync{.async = true};
const Placements kWhole{Replicate{}, Replicate{}};

TEST_ON_RANKS(AsyncRedistribute, WaitsAtTheFirstUse, 4) {
  Log log;
  const auto mesh = logged_mesh(rank, log);
  const auto x = distribute_tensor(counting_values({7, 5}), mesh, {Shard{0}, Replicate{}});
  const auto y = x.redistribute(kWhole, kAsync);
  EXPECT_EQ(y.tensor().sizes(), (std::vector<std::int64_t>{7, 5}));
  EXPECT_EQ(y.placements(), kWhole);
  EXPECT_EQ(log, (Log{"start dp"}));
  EXPECT_TRUE(at::equal(y.tensor().mul(2).sum(), y.tensor().sum().mul(2)));
  EXPECT_TRUE(at::equal(y.to_local(), counting_values({7, 5})));
  EXPECT_EQ(log, (Log{"start dp", "wait dp"}));
}

TEST_ON_MESH(AsyncRedistribute, ReadsTheTensorBeforeItIsWritten, {4}, {"x"}) {
  using Row = std::pair<Placement, Placement>;
  for (const auto& [from, to] : {Row{Shard{0}, Replicate{}}, Row{Shard{0}, Partial{}},
                                 Row{Partial{}, Shard{0}}, Row{Shard{1}, Shard{0}}}) {
    const auto x = distribute_tensor(counting_values({40, 100}), mesh, {from});
    const auto y = x.redistribute({to}, kAsync);
    x.tensor().add_(1000);
    EXPECT_EQUAL(y, counting_values({40, 100}));
  }
}

// By default, asynchronous redistributions are awaited in the order of their calls. Devices keep
// this order themselves, so there each result is awaited when the program uses it.
TEST(AsyncRedistribute, OverlapsOnTwoGroups) {
  for (const bool on_device : {false, true}) {
    RunRanks(4, [&](Rank& rank) {
      Log log;
      const auto mesh = logged_mesh(rank, log, on_device);
      const auto a = distribute_tensor(counting_values({7, 5}), mesh, {Shard{0}, Replicate{}});
      const auto b = distribute_tensor(counting_values({5, 3}), mesh, {Replicate{}, Partial{}});
      const auto whole_a = a.redistribute(kWhole, kAsync);
      const auto whole_b = b.redistribute(kWhole, kAsync);
      EXPECT_EQ(log, (Log{"start dp", "start tp"}));
      EXPECT_TRUE(at::equal(whole_b.to_local(), counting_values({5, 3})));
      EXPECT_TRUE(at::equal(whole_a.to_local(), counting_values({7, 5})));
      const std::string first = on_device ? "wait tp" : "wait dp";
      EXPECT_EQ(log, (Log{"start dp", "start tp", first, on_device ? "wait dp" : "wait tp"}));
    });
  }
}

// Ranks use two asynchronous results in different orders. No rank may wait forever.
TEST_ON_MESH(AsyncRedistribute, ResultsCanBeUsedInDifferentOrders, {2, 2}, {"dp", "tp"}) {
  constexpr std::int64_t kLarge = 3 << 20;
  const auto x = distribute_tensor(at::arange(kLarge), mesh, {Shard{0}, Replicate{}});
  const auto y = distribute_tensor(at::arange(kLarge), mesh, {Replicate{}, Shard{0}});
  const auto a = x.redistribute(kWhole, kAsync), b = y.redistribute(kWhole, kAsync);
  if (rank.rank() != 2) {
    const auto& first = rank.rank() == 1 ? a : b;
    EXPECT_EQ(first.to_local()[kLarge - 1].item<std::int64_t>(), kLarge - 1);
  }
  EXPECT_EQUAL(y, at::arange(kLarge));
  EXPECT_TRUE(at::equal(a.to_local(), b.to_local()));
}

TEST(AsyncRedistribute, FinishesBeforeASynchronousCollective) {
  const std::vector<void (*)(const DeviceMesh&, const at::Tensor&)> waits{
      [](const DeviceMesh&, const at::Tensor& b) { at::argmax(b); },
      [](const DeviceMesh& mesh, const at::Tensor&) {
        detail::DeferredSums sums;
        sums.add(mesh.group("tp"), at::ones({2}), [](const at::Tensor&) {});
        sums.run();
      }};
  RunRanks(4, [&](Rank& rank) {
    Log log;
    const auto mesh = logged_mesh(rank, log);
    const auto a = distribute_tensor(counting_values({7, 5}), mesh, {Shard{0}, Replicate{}});
    const auto b = distribute_tensor(counting_values({5, 3}), mesh, {Replicate{}, Shard{0}});
    for (const auto wait : waits) {
      log.clear();
      const auto whole_a = a.redistribute(kWhole, kAsync);
      wait(mesh, b);
      EXPECT_EQ(log, (Log{"start dp", "wait dp", "start tp", "wait tp"}));
    }
  });
}

TEST_ON_RANKS(AsyncRedistribute, FinishesIfTheResultIsUnused, 4) {
  Log log;
  const auto mesh = logged_mesh(rank, log);
  const auto x = distribute_tensor(counting_values({7, 5}), mesh, {Shard{0}, Replicate{}});
  x.redistribute(kWhole, kAsync);
  EXPECT_EQ(log, (Log{"start dp", "wait dp"}));
}

TEST_ON_MESH(AsyncRedistribute, PropagatesGradients, {2, 2}, {"dp", "tp"}) {
  auto plain = counting_values({7, 5}).requires_grad_();
  plain.pow(2).sum().backward();
  const auto leaf =
      distribute_tensor(counting_values({7, 5}), mesh, {Shard{0}, Shard{1}}).tensor().detach();
  leaf.requires_grad_();
  const auto moved = DistributedTensor(leaf).redistribute({Shard{1}, Shard{0}}, kAsync);
  moved.tensor().pow(2).sum().backward();
  EXPECT_EQ(DistributedTensor(leaf.grad()).placements(), (Placements{Shard{0}, Shard{1}}));
  EXPECT_CLOSE(leaf.grad(), plain.grad());
}

TEST(AsyncRedistribute, ThrowsPeerErrorsAtTheFirstUse) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({2}, {"x"});
    const auto x = distribute_tensor(counting_values({4}), mesh, {Shard{0}});
    x.full_tensor();  // The first collective creates the process group.
    if (rank.rank() == 1) {
      fail("this rank ends early");
    }
    const auto y = x.redistribute({Replicate{}}, kAsync);
    EXPECT_THROWN(comm::PeerError, y.to_local(), "all_gather in group 'x' (ranks 0, 1), rank 0",
                  "look for its error");
    y.to_local();
  });
  EXPECT_CONTAINS(errors[1], "ends early");
  EXPECT_CONTAINS(errors[0], "all_gather in group", "look for");
}

}  // namespace
}  // namespace tessera
