// Redistributions that are waited for at the first use of their values.

#include "tessera/comm/communicator.h"
#include "tessera/dtensor/detail/transfers.h"
#include "testing/distributed.h"
#include "testing/forwarding_communicator.h"

namespace tessera {
namespace {

using comm::CommunicatorPtr;
using comm::WorkPtr;
using testing::counting_values;
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

/// Notes when collectives of a group start and when they are waited for.
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

/// A mesh of 2 x 2 whose groups write to `log`. `on_device`: as if a device kept their order.
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

TEST_ON_RANKS(Async, WaitsAtTheFirstUse, 4) {
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

// An empty tensor needs no collective; what is left to do is the change of its local sizes.
TEST_ON_MESH(Async, AnEmptyTensorHasTheSizesOfItsLayout, {2}, {"dp"}) {
  const auto x = distribute_tensor(at::empty({0, 4}), mesh, {Shard{0}});
  const auto y = x.redistribute({Replicate{}}, kAsync);
  EXPECT_EQ(y.to_local().sizes(), (std::vector<std::int64_t>{0, 4}));
  EXPECT_EQ(y.full_tensor().sizes(), (std::vector<std::int64_t>{0, 4}));
}

TEST_ON_RANKS(Async, OverlapsOnTwoGroups, 4) {
  Log log;
  const auto mesh = logged_mesh(rank, log);
  const auto a = distribute_tensor(counting_values({7, 5}), mesh, {Shard{0}, Replicate{}});
  const auto b = distribute_tensor(counting_values({5, 3}), mesh, {Replicate{}, Partial{}});
  const auto whole_a = a.redistribute(kWhole, kAsync);
  const auto whole_b = b.redistribute(kWhole, kAsync);
  EXPECT_EQ(log, (Log{"start dp", "start tp"}));
  EXPECT_TRUE(at::equal(whole_b.to_local(), counting_values({5, 3})));
  EXPECT_TRUE(at::equal(whole_a.to_local(), counting_values({7, 5})));
  EXPECT_EQ(log, (Log{"start dp", "start tp", "wait dp", "wait tp"}));
}

// The group decides, not where the tensors are: those of a GPU may go through the host's memory.
TEST_ON_RANKS(Async, IsWaitedForInTheOrderOfUseWhereADeviceKeepsTheOrderOfCalls, 4) {
  Log log;
  const auto mesh = logged_mesh(rank, log, /*on_device=*/true);
  const auto a = distribute_tensor(counting_values({7, 5}), mesh, {Shard{0}, Replicate{}});
  const auto b = distribute_tensor(counting_values({5, 3}), mesh, {Replicate{}, Partial{}});
  const auto whole_a = a.redistribute(kWhole, kAsync);
  const auto whole_b = b.redistribute(kWhole, kAsync);
  EXPECT_TRUE(at::equal(whole_b.to_local(), counting_values({5, 3})));
  EXPECT_TRUE(at::equal(whole_a.to_local(), counting_values({7, 5})));
  EXPECT_EQ(log, (Log{"start dp", "start tp", "wait tp", "wait dp"}));
}

// A collective of more rounds than one needs its peers to continue while they use something else.
TEST_ON_MESH(Async, RanksMayUseResultsInUnlikeOrders, {2, 2}, {"dp", "tp"}) {
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

TEST(Async, PendingCollectivesFinishBeforeASynchronousOne) {
  const std::vector<void (*)(const DeviceMesh&, const at::Tensor&)> waits{
      [](const DeviceMesh&, const at::Tensor& b) { at::argmax(b); },
      [](const DeviceMesh&, const at::Tensor& b) { b.max(0); },
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

TEST_ON_MESH(Async, MovesAllPairsUneven, {2, 2}, {"dp", "tp"}) {
  const std::vector<Placements> all{{Replicate{}, Replicate{}}, {Shard{0}, Shard{1}},
                                    {Shard{0}, Shard{0}},       {Partial{}, Shard{1}},
                                    {Shard{1}, Partial{}},      {StridedShard{0, 2}, Shard{0}}};
  for (const auto& from : all) {
    for (const auto& to : all) {
      const auto x =
          distribute_tensor(counting_values({7, 5}), mesh, from).redistribute(to, kAsync);
      EXPECT_EQ(x.placements(), to);
      EXPECT_EQUAL(x, counting_values({7, 5}));
    }
  }
}

TEST_ON_RANKS(Async, AnUnusedTensorIsFinished, 4) {
  Log log;
  const auto mesh = logged_mesh(rank, log);
  const auto x = distribute_tensor(counting_values({7, 5}), mesh, {Shard{0}, Replicate{}});
  x.redistribute(kWhole, kAsync);
  EXPECT_EQ(log, (Log{"start dp", "wait dp"}));
}

TEST_ON_MESH(Async, CarriesGradientsBack, {2, 2}, {"dp", "tp"}) {
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

TEST_ON_MESH(Async, DoesNotShareTheVersionOfItsSource, {2}, {"x"}) {
  const auto x = distribute_tensor(counting_values({4}), mesh, {Shard{0}});
  const auto y = x.redistribute({Replicate{}}, kAsync);
  const auto before = x.tensor()._version();
  y.tensor().add_(1);
  EXPECT_EQ(x.tensor()._version(), before);
  EXPECT_EQ(y.tensor()._version(), local_tensor(y)._version());
  EXPECT_EQUAL(x, counting_values({4}));
}

TEST(Async, AFailureOfAPeerIsThrownWhereTheValuesAreUsed) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const auto mesh = rank.mesh({2}, {"x"});
    const auto x = distribute_tensor(counting_values({4}), mesh, {Shard{0}});
    x.full_tensor();  // the group is there
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
