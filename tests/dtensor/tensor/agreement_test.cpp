// from_local and distribute_tensor compare the ranks' tensors where TESSERA_DEBUG asks for it: all
// ranks throw, also where only one finds an error.

#include "tessera/comm/trace.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {
namespace {

/// The error that each of two ranks catches: the other rank must not wait for it.
std::vector<std::string> errors_of(const testing::Body& body) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Rank& rank) {
    errors[static_cast<std::size_t>(rank.rank())] = testing::message_of([&] { body(rank); });
    // Both are still in step.
    const auto x = distribute_tensor(at::ones({4}), rank.mesh({2}, {"x"}), {Shard{0}});
    EXPECT_TRUE(at::equal(x.full_tensor(), at::ones({4})));
  });
  return errors;
}

TEST(Agreement, FailsOnAllRanksIfOneRankFails) {
  const testing::DebugChecks debug("1");
  const auto errors = errors_of([](Rank& rank) {
    const auto local = at::zeros({rank.rank() == 0 ? 2 : 3});
    DistributedTensor::from_local(local, rank.mesh({2}, {"x"}), {Shard{0}}, {{4}});
  });
  EXPECT_CONTAINS(errors[0], "disagree");
  EXPECT_CONTAINS(errors[1], "rank 1 of");
}

TEST(Agreement, ComparesSpecs) {
  const testing::DebugChecks debug("1");
  const auto errors = errors_of([](Rank& rank) {
    const auto mesh = rank.mesh({2}, {"x"});
    const auto layout = Layout::replicated({2}, 1);
    const auto dtype = rank.rank() == 0 ? at::kFloat : at::kDouble;
    DistributedTensor::from_local(at::zeros({3}, dtype), ShardingSpec{mesh, layout}, {3});
  });
  EXPECT_CONTAINS(errors[0], "Float");
  EXPECT_CONTAINS(errors[1], "Double");
}

TEST(Agreement, ComparesBeforeTheSourceScatters) {
  const testing::DebugChecks debug("1");
  const auto errors = errors_of([](Rank& rank) {
    distribute_tensor(at::zeros({rank.rank() == 0 ? 4 : 6}), rank.mesh({2}, {"x"}), {Shard{0}},
                      {.source = 0});
  });
  EXPECT_CONTAINS(errors[0], "[4]");
  EXPECT_CONTAINS(errors[1], "[6]");
}

TEST(Agreement, ComparesPlacementsInDistributeTensor) {
  const testing::DebugChecks debug("1");
  const auto errors = errors_of([](Rank& rank) {
    distribute_tensor(at::zeros({4, 4}), rank.mesh({2}, {"x"}), {Shard{rank.rank()}});
  });
  EXPECT_CONTAINS(errors[0], "Shard(0)");
  EXPECT_CONTAINS(errors[1], "Shard(1)");
}

// As many elements, but of tensors of other sizes: nothing else would tell them apart.
TEST(Agreement, ComparesEveryRedistribution) {
  const testing::DebugChecks debug("1");
  const auto errors = errors_of([](Rank& rank) {
    const auto x = distribute_tensor(at::ones({4, 4}), rank.mesh({2}, {"x"}), {Shard{0}});
    const auto sizes =
        rank.rank() == 0 ? std::vector<std::int64_t>{2, 8} : std::vector<std::int64_t>{8, 2};
    DistributedTensor(x.tensor().view(sizes)).full_tensor();
  });
  EXPECT_CONTAINS(errors, "Float [2, 8] [m0 | -] -> [- | -]", "Float [8, 2] [m0 | -] -> [- | -]");
}

TEST(Agreement, CostsNothingWhereItIsOff) {
  const testing::DebugChecks debug("0");
  RunRanks(2, [](Rank& rank) {
    DistributedTensor::from_local(at::zeros({2}), rank.mesh({2}, {"x"}), {Shard{0}});
    EXPECT_EQ(comm::total(rank.world()->traffic().table()).calls, 0);
  });
}

TEST(Agreement, IsCheckedByDefaultInBuildsWithoutNdebug) {
  const testing::DebugChecks unset("");
#ifdef NDEBUG
  static constexpr int kCalls = 0;
#else
  static constexpr int kCalls = 1;
#endif
  RunRanks(2, [](Rank& rank) {
    DistributedTensor::from_local(at::zeros({2}), rank.mesh({2}, {"x"}), {Shard{0}});
    EXPECT_EQ(comm::total(rank.world()->traffic().table()).calls, kCalls);
  });
}

}  // namespace
}  // namespace tessera
