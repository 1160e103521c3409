// Kinds of faults that the trainings of training_test.cpp do not have. Mutations.AreAllFound shows
// that the checker finds accesses that no event orders, CheckedTraining that it accepts the others.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <functional>

#include "race/checked_world.h"
#include "tessera/comm/detail/scopes.h"
#include "testing/errors.h"

namespace tessera::race {
namespace {

using comm::Lane;
using comm::LaneScope;

/// The faults that are found in `work` on one rank.
std::vector<std::string> faults_of(const std::function<void(CheckedRank&)>& work) {
  std::vector<std::string> faults;
  RunRanks(1, [&](Rank& rank) {
    CheckedRank checked(rank);
    work(checked);
    faults = checked.checker().faults();
  });
  return faults;
}

TEST(RaceChecker, LooksAtTheElementsThatAreUsed) {
  EXPECT_EQ(faults_of([](CheckedRank& rank) {
              const at::Tensor a = at::ones({8});
              rank.streams().order(Lane::kCompute, Lane::kAllGather);
              a.narrow(0, 0, 4).mul_(2);
              const LaneScope lane(rank.streams(), Lane::kAllGather);
              a.narrow(0, 4, 4).mul_(2);
            }).size(),
            0u);
}

TEST(RaceChecker, FindsAReadOfUnwrittenMemoryAndFillsItWithNan) {
  const auto faults = faults_of([](CheckedRank&) {
    const at::Tensor a = at::empty({128});
    EXPECT_TRUE(a.isnan().all().item<bool>());
  });
  ASSERT_FALSE(faults.empty());
  EXPECT_CONTAINS(faults.front(), "nobody has written", "memory in lane compute");
}

TEST(RaceChecker, FindsFreedMemoryThatIsTakenBeforeItsUserIsDone) {
  const auto use_elsewhere = [](CheckedRank& rank, bool waits) {
    at::Tensor a = at::ones({8});
    rank.streams().order(Lane::kCompute, Lane::kAllGather);
    {
      const LaneScope lane(rank.streams(), Lane::kAllGather);
      a.sum();
    }
    if (waits) {
      rank.streams().order(Lane::kAllGather, Lane::kCompute);
    }
    a.reset();
    at::ones({8});
  };
  EXPECT_EQ(faults_of([&](CheckedRank& rank) { use_elsewhere(rank, true); }).size(), 0u);
  const auto faults = faults_of([&](CheckedRank& rank) { use_elsewhere(rank, false); });
  ASSERT_FALSE(faults.empty());
  EXPECT_CONTAINS(faults.front(), "was freed, and is taken by memory in lane compute before",
                  "aten::sum in lane all_gather");
}

TEST(RaceChecker, FindsACollectiveThatIsNotWaitedFor) {
  std::vector<std::string> faults;
  RunRanks(2, [&](Rank& rank) {
    CheckedRank checked(rank);
    const DeviceMesh mesh = checked.mesh({2}, {"dp"});
    const at::Tensor a = at::ones({8});
    const comm::PurposeScope purpose(mesh.group(), "unit 'a'");
    const comm::WorkPtr work = mesh.group().all_reduce(a, ReduceOp::kSum);
    a.sum();
    work->wait();
    a.sum();
    if (rank.rank() == 0) {
      faults = checked.checker().faults();
    }
  });
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_CONTAINS(faults.front(), "aten::sum in lane compute reads what",
                  "all_reduce of unit 'a' over group 'dp' writes");
}

}  // namespace
}  // namespace tessera::race
