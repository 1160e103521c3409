// Tests agree_on_calls(), which compares the collective calls of a process group between its ranks.
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <stdexcept>

#include "group_of_all.h"
#include "tessera/comm/detail/scopes.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using testing::ErrorsOfRanks;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::RanksOptions;

const std::string kDiffer = "the ranks' calls since the last agreement differ: call ";

void gather(Communicator& group, const std::string& purpose) {
  const PurposeScope scope(group, purpose);
  group.all_gather(at::zeros({2 * group.size()}), at::zeros({2}))->wait();
}

/// Calls an all-gather of empty tensors, which does not wait for other ranks.
void gather_nothing(Communicator& group, const std::string& purpose) {
  const PurposeScope scope(group, purpose);
  group.all_gather(at::zeros({0}), at::zeros({0}))->wait();
}

class CallAgreement : public ::testing::Test {
 protected:
  const testing::SharedMemory without_shared_memory_{false};
};

TEST_F(CallAgreement, AcceptsEqualCallsWithoutTraffic) {
  RunRanks(3, [](Rank& rank) {
    Communicator& group = *group_of_all(*rank.world());
    EXPECT_EQ(group.name(), "gloo");
    for (int step = 0; step < 3; ++step) {
      gather(group, "unit 'a'");
      const TrafficTable before = rank.world()->traffic().table();
      group.agree_on_calls();
      group.agree_on_calls();
      EXPECT_TRUE(rank.world()->traffic().since(before).empty());
    }
  });
}

/// Ranks 0 and 2 call all-gathers "b", "c", "e". Rank 1 calls the all-gathers in `purposes` and
/// reports `error`. The message must name the first difference.
struct Difference {
  std::vector<std::string> purposes;
  std::string error, number, of_others, of_rank_1;
};

TEST_F(CallAgreement, NamesTheFirstDifferentCall) {
  const std::vector<Difference> rows{
      {{"b", "d", "e"}, "", "2", "all_gather for c", "all_gather for d"},
      {{"b", "c"}, "", "3", "all_gather for e", "nothing"},
      {{"b", "c", "e"}, "lost", "4", "nothing", "an error (lost)"}};
  for (const Difference& row : rows) {
    const auto errors = ErrorsOfRanks(3, [&](Rank& rank) {
      const bool differs = rank.rank() == 1;
      Communicator& group = *group_of_all(*rank.world());
      gather(group, "unit 'a'");
      group.agree_on_calls();
      for (const auto& purpose : differs ? row.purposes : std::vector<std::string>{"b", "c", "e"}) {
        gather_nothing(group, purpose);
      }
      const std::string message =
          own_error_of([&] { group.agree_on_calls(differs ? row.error : ""); });
      gather(group, "unit 'f'");
      group.agree_on_calls();
      TESSERA_CHECK(message.empty(), message);
    });
    const std::string begin = kDiffer + row.number + " is ", here = " on this rank, ";
    EXPECT_THAT(errors[0], HasSubstr(begin + row.of_others + here + row.of_rank_1 + " on rank 1;"));
    EXPECT_THAT(errors[1],
                HasSubstr(begin + row.of_rank_1 + here + row.of_others + " on ranks 0, 2;"));
    EXPECT_THAT(errors[2], HasSubstr("in group 'all' (ranks 0, 1, 2), rank 2"));
  }
}

TEST_F(CallAgreement, DistinguishesCollectivesWithTheSamePurpose) {
  const auto errors = ErrorsOfRanks(2, [](Rank& rank) {
    Communicator& group = *group_of_all(*rank.world());
    const PurposeScope scope(group, "unit 'a'");
    const at::Tensor none = at::zeros({0});
    const std::vector<std::int64_t> counts{0, 0};
    group.all_reduce(none, ReduceOp::kSum)->wait();
    group.broadcast(none, 0)->wait();
    group.all_to_all(none, none, counts, counts)->wait();
    rank.rank() == 0 ? group.reduce_scatter(none, none, ReduceOp::kSum)->wait()
                     : group.all_gather(none, none)->wait();
    group.agree_on_calls();
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("call 4 is"), HasSubstr("reduce_scatter for unit 'a'"),
                                 HasSubstr("all_gather for unit 'a'"))));
}

TEST_F(CallAgreement, IgnoresCallsWithoutPurposeAndCallsOfOtherGroups) {
  RunRanks(2, [](Rank& rank) {
    Communicator& all = *group_of_all(*rank.world());
    Communicator& again = *rank.world()->group({0, 1}, "again");
    if (rank.rank() == 1) {
      gather_nothing(all, "");
    }
    gather(all, "unit 'a'");
    again.agree_on_calls();
    gather(again, "unit 'b'");
    again.agree_on_calls();
    all.agree_on_calls();
  });
}

// The ranks make 6000 calls, which are too many to list in one error message.
TEST_F(CallAgreement, ComparesAnyNumberOfCalls) {
  for (const int different : {4000, 5000}) {
    const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
      Communicator& group = *group_of_all(*rank.world());
      for (int call = 0; call < 6000; ++call) {
        gather_nothing(group, call == different && rank.rank() == 1 ? "this" : "that");
      }
      group.agree_on_calls();
    });
    EXPECT_THAT(errors, Each(HasSubstr(different == 4000 ? "call 4001 is all_gather for th"
                                                         : "the calls after the first 4096")));
  }
}

TEST_F(CallAgreement, TimesOutIfARankIsMissing) {
  for (const bool met : {false, true}) {
    const auto errors = ErrorsOfRanks(3,
                                      [&](Rank& rank) {
                                        Communicator& group = *group_of_all(*rank.world());
                                        gather(group, "unit 'a'");
                                        if (met) {
                                          group.agree_on_calls();
                                        }
                                        gather(group, "unit 'b'");
                                        if (rank.rank() != 1) {
                                          group.agree_on_calls();
                                        }
                                      },
                                      {.world = {.timeout = std::chrono::milliseconds(700)}});
    EXPECT_THAT(errors[0] + errors[2], HasSubstr("did not arrive"));
    EXPECT_THAT(errors[0], HasSubstr("rank 0, after all_gather for unit 'b': "));
    EXPECT_THAT(errors[1], IsEmpty());
    EXPECT_THAT(errors[2], HasSubstr("rank 2, after all_gather for unit 'b': "));
  }
}

// The time-out is ten minutes, so the test ends in time only if no rank waits for the time-out.
TEST_F(CallAgreement, FailsSoonAfterARankFails) {
  for (const bool met : {false, true}) {
    const auto errors = ErrorsOfRanks(3,
                                      [&](Rank& rank) {
                                        Communicator& group = *group_of_all(*rank.world());
                                        gather(group, "unit 'a'");
                                        if (met) {
                                          group.agree_on_calls();
                                        }
                                        if (rank.rank() == 1) {
                                          throw std::runtime_error("the cause");
                                        }
                                        EXPECT_THROWN(PeerError, group.agree_on_calls(),
                                                      "agreement on the calls in group 'all'",
                                                      "rank 1 gave up", "look for its error");
                                        group.agree_on_calls();
                                      },
                                      {.world = {.timeout = std::chrono::minutes(10)}});
    EXPECT_EQ(errors[1], "the cause");
    EXPECT_THAT(errors[0], HasSubstr("failed earlier"));
    EXPECT_THAT(errors[2], HasSubstr("failed earlier"));
  }
}

TEST(CallAgreementWithSharedMemoryOrOneRank, DoesNotWait) {
  for (const int ranks : {1, 2}) {
    RunRanks(ranks, [](Rank& rank) {
      Communicator& group = *group_of_all(*rank.world());
      gather(group, "unit 'a'");
      if (rank.rank() + 1 == rank.size()) {
        group.agree_on_calls("lost");
      }
      gather(group, "unit 'b'");
    });
  }
}

}  // namespace
}  // namespace tessera::comm
