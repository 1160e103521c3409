// Tests that if a rank fails, the other ranks soon end with an error that names the failed rank.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <stdexcept>

#include "group_of_all.h"

namespace tessera::comm {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::ErrorsOfRanks;
using ::testing::HasSubstr;
using testing::RanksOptions;

void sum(Rank& rank, std::int64_t elements = 4) {
  group_of_all(*rank.world())->all_reduce(at::zeros({elements}), ReduceOp::kSum)->wait();
}

class Failures : public OnBackend {
 protected:
  /// Options with the default time-out. All tests of this file must end before it.
  static RanksOptions patient() { return on_hosts(GetParam().hosts); }
  static RanksOptions hasty() {
    RanksOptions options = patient();
    options.world.timeout = std::chrono::milliseconds(300);
    return options;
  }
};

TEST_P(Failures, OnOneRankEndTheOtherRanks) {
  const auto body = [](Rank& rank) {
    sum(rank);
    if (rank.rank() == 1) {
      throw std::out_of_range("the cause");
    }
    sum(rank);
  };
  const auto failed = HasSubstr("all_reduce in group 'all'");
  EXPECT_THAT(ErrorsOfRanks(3, body, patient()), ElementsAre(failed, "the cause", failed));
  // RunRanks() throws the exception of the failed rank, not the PeerErrors of the other ranks.
  EXPECT_THROWN(std::out_of_range, RunRanks(3, body, patient()), "the cause");
}

TEST_P(Failures, MissingRankFailsTheGroupAfterTheTimeOut) {
  const auto errors = ErrorsOfRanks(
      3,
      [](Rank& rank) {
        sum(rank);
        if (rank.rank() == 1) {
          return;
        }
        EXPECT_THROWN(PeerError, sum(rank), "all_reduce in group 'all' (ranks 0, 1, 2), rank");
        sum(rank);
      },
      hasty());
  EXPECT_THAT(errors, ElementsAre(HasSubstr("failed earlier"), "", HasSubstr("failed earlier")));
}

TEST_P(Failures, IncompleteGroupFailsAfterTheTimeOut) {
  const auto errors = ErrorsOfRanks(
      2,
      [](Rank& rank) {
        if (rank.rank() == 0) {
          sum(rank);
        }
      },
      hasty());
  EXPECT_THAT(errors[0], HasSubstr("group 'all' (ranks 0, 1), rank 0"));
}

INSTANTIATE_TEST_SUITE_P(OnBackends, Failures,
                         ::testing::Values(BackendCase{"shm", "aaa"}, BackendCase{"gloo", "aba"}),
                         [](const auto& info) { return std::string(info.param.backend); });

/// Rank 1 calls `other` while ranks 0 and 2 call sum(). Returns the error messages of the ranks.
/// Afterwards, sum() must succeed on all ranks.
std::vector<std::string> errors_when_rank_1_calls(const testing::Body& other) {
  return ErrorsOfRanks(3, [&](Rank& rank) {
    sum(rank);
    const std::string message = own_error_of([&] { rank.rank() == 1 ? other(rank) : sum(rank); });
    sum(rank);
    TESSERA_CHECK(message.empty(), message);
  });
}

TEST(Mismatch, IsReportedOnEveryRank) {
  const auto reduce = [](const at::Tensor& tensor, ReduceOp op) {
    return [=](Rank& rank) { group_of_all(*rank.world())->all_reduce(tensor, op)->wait(); };
  };
  struct Row {
    testing::Body call_of_rank_1;
    std::vector<std::string_view> words;
  };
  for (const Row& row : std::vector<Row>{
           {[](Rank& rank) { group_of_all(*rank.world())->barrier(); },
            {"the ranks disagree", "all_reduce (call 2", "sum)", "barrier (call 2)"}},
           {[](Rank& rank) { sum(rank, 5'000'000); }, {"4 elements", "5000000 elements"}},
           {reduce(at::zeros({4}, at::kLong), ReduceOp::kSum), {"Float", "Long"}},
           {reduce(at::zeros({4}), ReduceOp::kMax), {"sum", "max"}}}) {
    const auto errors = errors_when_rank_1_calls(row.call_of_rank_1);
    EXPECT_TRUE(testing::Contains(errors, row.words));
    EXPECT_THAT(errors, Each(Not(HasSubstr("root"))));
  }
}

TEST(Mismatch, OfRootsOrCountsIsReportedOnEveryRank) {
  const auto roots = ErrorsOfRanks(3, [](Rank& rank) {
    group_of_all(*rank.world())->broadcast(at::zeros({4}), rank.rank() == 2 ? 1 : 0)->wait();
  });
  EXPECT_CONTAINS(roots, "root 0", "root 1");
  const auto counts = ErrorsOfRanks(3, [](Rank& rank) {
    // Rank 2 sends three elements to rank 0, which expects one element.
    const std::vector<std::int64_t> ones = {1, 1, 1};
    const std::vector<std::int64_t> sends = {rank.rank() == 2 ? 3 : 1, 1, 1};
    const at::Tensor input = at::zeros({rank.rank() == 2 ? 5 : 3});
    group_of_all(*rank.world())->all_to_all(at::empty({3}), input, ones, sends)->wait();
  });
  EXPECT_CONTAINS(counts, "rank 2 sends 3 elements to rank 0, which expects 1");
}

TEST_ON_RANKS(World, RefusesInvalidGroupsAndReturnsTheSameGroupAgain, 2) {
  comm::World& world = *rank.world();
  const std::string no_member = detail::concat("rank ", rank.rank(), " is not a member");
  for (const std::vector<int>& ranks : {std::vector<int>{0, 2}, {0, 0}}) {
    EXPECT_ERROR(world.group(ranks, "g"), "repeated or outside the world of 2");
  }
  EXPECT_ERROR(world.group({1 - rank.rank()}, "g"), no_member);
  EXPECT_ERROR(world.group({}, "g"), no_member);
  EXPECT_EQ(group_of_all(world), group_of_all(world));
  EXPECT_NE(group_of_all(world), world.group({0, 1}, "other"));
  EXPECT_NE(group_of_all(world), world.group({1, 0}, "all"));
}

TEST_ON_RANKS(World, OverlappingGroupsDoNotMix, 3) {
  for (const int first : {0, 1}) {
    if (rank.rank() == first || rank.rank() == first + 1) {
      const at::Tensor tensor = at::full({1}, 1.0 + rank.rank());
      rank.world()->group({first, first + 1}, "pair")->all_reduce(tensor, ReduceOp::kSum)->wait();
      EXPECT_EQ(tensor.item<float>(), 3.0F + 2.0F * static_cast<float>(first));
    }
  }
}

TEST(World, RefusesUnknownDevicesAndBackends) {
  EXPECT_ERROR(thread_worlds(1, {.device = "tpu"}), "device 'tpu' is unknown");
  EXPECT_ERROR(thread_worlds(1, {.backend = "mpi"}), "backend 'mpi' is unknown");
  EXPECT_ERROR(thread_worlds(1, {.backend = "nccl"}), "nccl needs device cuda");
  if (!std::filesystem::exists("/dev/nvidia0")) {
    EXPECT_THAT(testing::message_of([] { thread_worlds(1, {.device = "cuda"}); }),
                AnyOf(HasSubstr("no GPU is visible"), HasSubstr("cannot be loaded")));
  }
}

}  // namespace
}  // namespace tessera::comm
