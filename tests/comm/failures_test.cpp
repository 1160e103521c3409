// One rank fails: the others must soon end with an error that names it.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "group_of_all.h"
#include "testing/environment.h"
#include "testing/errors.h"
#include "testing/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using testing::ErrorsOfRanks;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::RanksOptions;

void sum(Rank& rank, std::int64_t elements = 4) {
  group_of_all(*rank.world())->all_reduce(at::zeros({elements}), ReduceOp::kSum)->wait();
}

struct Case {
  const char* backend;
  std::string hosts;  ///< a letter for each rank's
};

class Failures : public ::testing::TestWithParam<Case> {
 protected:
  const testing::SharedMemory shared_memory_{std::string(GetParam().backend) != "gloo"};

  /// A time-out that no test of prompt detection waits for.
  static RanksOptions patient() { return on_hosts(GetParam().hosts); }
  static RanksOptions hasty() {
    RanksOptions options = patient();
    options.world.timeout = std::chrono::milliseconds(300);
    return options;
  }
};

TEST_P(Failures, AnErrorOnOneRankEndsTheOthers) {
  const auto errors = ErrorsOfRanks(
      3,
      [](Rank& rank) {
        sum(rank);
        if (rank.rank() == 1) {
          throw std::runtime_error("the cause");
        }
        sum(rank);
      },
      patient());
  EXPECT_EQ(errors[1], "the cause");
  EXPECT_THAT(errors[0], HasSubstr("all_reduce in group 'all'"));
  EXPECT_THAT(errors[2], HasSubstr("all_reduce in group 'all'"));
}

TEST_P(Failures, TheFixtureRethrowsTheCauseAndNotItsEcho) {
  const auto body = [](Rank& rank) {
    sum(rank);
    if (rank.rank() == 2) {
      throw std::out_of_range("the cause");
    }
    sum(rank);
  };
  EXPECT_THROWN(std::out_of_range, RunRanks(3, body, patient()), "the cause");
}

TEST_P(Failures, ARankThatDoesNotComeIsATimeOut) {
  const auto errors = ErrorsOfRanks(
      3,
      [](Rank& rank) {
        sum(rank);
        if (rank.rank() != 1) {
          sum(rank);
        }
      },
      hasty());
  // The first rank whose time is up says so; the other may learn it from that one.
  EXPECT_THAT(errors[0] + errors[2], HasSubstr("300"));
  EXPECT_THAT(errors[0], HasSubstr("all_reduce in group 'all'"));
  EXPECT_THAT(errors[1], IsEmpty());
  EXPECT_THAT(errors[2], HasSubstr("all_reduce in group 'all'"));
}

TEST_P(Failures, AFailedGroupStaysFailed) {
  const auto errors = ErrorsOfRanks(
      2,
      [](Rank& rank) {
        sum(rank);
        if (rank.rank() == 1) {
          return;
        }
        EXPECT_THROWN(PeerError, sum(rank), "all_reduce in group 'all' (ranks 0, 1), rank 0",
                      "300");
        sum(rank);
      },
      hasty());
  EXPECT_THAT(errors[0], HasSubstr("failed earlier"));
}

TEST_P(Failures, AGroupThatNotAllJoinIsATimeOut) {
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
                         ::testing::Values(Case{"shm", "aaa"}, Case{"gloo", "aba"}),
                         [](const auto& info) { return std::string(info.param.backend); });

/// The errors when rank 1 of 3 calls something else; then all make a call that must work.
std::vector<std::string> errors_when_rank_1_calls(const testing::Body& other) {
  return ErrorsOfRanks(3, [&](Rank& rank) {
    sum(rank);
    std::string message;
    try {
      rank.rank() == 1 ? other(rank) : sum(rank);
    } catch (const PeerError&) {
      throw;
    } catch (const Error& error) {
      message = error.what();
    }
    sum(rank);
    TESSERA_CHECK(message.empty(), message);
  });
}

TEST(Mismatch, CollectiveMismatchIsNamedOnEveryRank) {
  const auto errors =
      errors_when_rank_1_calls([](Rank& rank) { group_of_all(*rank.world())->barrier(); });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("the ranks disagree"), HasSubstr("all_reduce (call 2"),
                                 HasSubstr("sum)"), HasSubstr("barrier (call 2)"),
                                 Not(HasSubstr("root")))));
}

TEST(Mismatch, SizeMismatchIsNamedOnEveryRank) {
  const auto errors = errors_when_rank_1_calls([](Rank& rank) { sum(rank, 5'000'000); });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("4 elements"), HasSubstr("5000000 elements"))));
}

TEST(Mismatch, TypeMismatchIsNamedOnEveryRank) {
  const auto errors = errors_when_rank_1_calls([](Rank& rank) {
    group_of_all(*rank.world())->all_reduce(at::zeros({4}, at::kLong), ReduceOp::kSum)->wait();
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("Float"), HasSubstr("Long"))));
}

TEST(Mismatch, ReductionMismatchIsNamedOnEveryRank) {
  const auto errors = errors_when_rank_1_calls([](Rank& rank) {
    group_of_all(*rank.world())->all_reduce(at::zeros({4}), ReduceOp::kMax)->wait();
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("sum"), HasSubstr("max"))));
}

TEST(Mismatch, RootMismatchIsNamedOnEveryRank) {
  const auto errors = ErrorsOfRanks(3, [](Rank& rank) {
    group_of_all(*rank.world())->broadcast(at::zeros({4}), rank.rank() == 2 ? 1 : 0)->wait();
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("root 0"), HasSubstr("root 1"))));
}

TEST(Mismatch, AllToAllCountMismatchIsNamedOnEveryRank) {
  const auto errors = ErrorsOfRanks(3, [](Rank& rank) {
    // Rank 2 sends three elements to rank 0, which expects one.
    const std::vector<std::int64_t> ones = {1, 1, 1};
    const std::vector<std::int64_t> sends = {rank.rank() == 2 ? 3 : 1, 1, 1};
    const at::Tensor input = at::zeros({rank.rank() == 2 ? 5 : 3});
    group_of_all(*rank.world())->all_to_all(at::empty({3}), input, ones, sends)->wait();
  });
  EXPECT_THAT(errors, Each(HasSubstr("rank 2 sends 3 elements to rank 0, which expects 1")));
}

TEST(Mismatch, SurfacesAtTheWaitOfAnAsynchronousCall) {
  const auto errors = ErrorsOfRanks(2, [](Rank& rank) {
    const at::Tensor tensor = at::zeros({4 + rank.rank()});
    const WorkPtr work = group_of_all(*rank.world())->all_reduce(tensor, ReduceOp::kSum);
    work->wait();
  });
  EXPECT_THAT(errors, Each(HasSubstr("disagree")));
}

TEST(World, RefusesBadGroups) {
  RunRanks(2, [](Rank& rank) {
    EXPECT_ERROR(rank.world()->group({0, 2}, "g"),
                 "of ranks 0, 2: a rank is repeated or outside the world of 2");
    EXPECT_ERROR(rank.world()->group({0, 0}, "g"),
                 "of ranks 0, 0: a rank is repeated or outside the world of 2");
    EXPECT_ERROR(rank.world()->group({1 - rank.rank()}, "g"),
                 detail::concat("rank ", rank.rank(), " is not a member"));
    EXPECT_ERROR(rank.world()->group({}, "g"),
                 detail::concat("rank ", rank.rank(), " is not a member"));
  });
}

TEST(World, MakesAGroupOnce) {
  RunRanks(2, [](Rank& rank) {
    EXPECT_EQ(group_of_all(*rank.world()), group_of_all(*rank.world()));
    EXPECT_NE(group_of_all(*rank.world()), rank.world()->group({0, 1}, "other"));
    EXPECT_NE(group_of_all(*rank.world()), rank.world()->group({1, 0}, "all"));
  });
}

TEST(World, OverlappingGroupsDoNotMix) {
  RunRanks(3, [](Rank& rank) {
    const int left = rank.rank();
    if (left < 2) {
      const at::Tensor tensor = at::full({1}, 1.0 + rank.rank());
      rank.world()->group({0, 1}, "pair")->all_reduce(tensor, ReduceOp::kSum)->wait();
      EXPECT_EQ(tensor.item<float>(), 3.0F);
    }
    if (left > 0) {
      const at::Tensor tensor = at::full({1}, 1.0 + rank.rank());
      rank.world()->group({1, 2}, "pair")->all_reduce(tensor, ReduceOp::kSum)->wait();
      EXPECT_EQ(tensor.item<float>(), 5.0F);
    }
  });
}

std::string error_with(const WorldOptions& options) {
  try {
    thread_worlds(1, options);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(World, RefusesUnknownDevicesAndBackends) {
  EXPECT_THAT(error_with({.device = "tpu"}), HasSubstr("device 'tpu' is unknown"));
  EXPECT_THAT(error_with({.backend = "mpi"}), HasSubstr("backend 'mpi' is unknown"));
  EXPECT_THAT(error_with({.backend = "nccl"}), HasSubstr("nccl needs device cuda"));
}

TEST(World, SaysWhyThereIsNoCuda) {
  if (std::filesystem::exists("/dev/nvidia0")) {
    GTEST_SKIP() << "there is a GPU";
  }
  EXPECT_THAT(error_with({.device = "cuda"}),
              AnyOf(HasSubstr("no GPU is visible"), HasSubstr("cannot be loaded")));
}

TEST(FakeWorld, PutsThisRanksDataInEveryPlace) {
  const WorldPtr world = fake_world(2, 1000);
  std::vector<int> ranks = {0, 2, 4};
  const CommunicatorPtr group = world->group(ranks, "g");
  EXPECT_EQ(group->rank(), 1);
  const at::Tensor gathered = at::empty({6});
  group->all_gather(gathered, at::full({2}, 7.0))->wait();
  EXPECT_EQ(gathered.sum().item<float>(), 42.0F);
  const at::Tensor part = at::empty({2});
  group->reduce_scatter(part, at::arange(6, at::kFloat), ReduceOp::kSum)->wait();
  EXPECT_EQ(part[0].item<float>(), 2.0F);
  EXPECT_EQ(world->traffic().table().at({"g", "all_gather"}).bytes, 8);
}

}  // namespace
}  // namespace tessera::comm
