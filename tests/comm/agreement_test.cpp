// Tests functions that compare values between ranks, or that throw an error of one rank on all.
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/agreement.h"

#include <gmock/gmock.h>

#include <stdexcept>

#include "group_of_all.h"

namespace tessera::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST_ON_RANKS(Agreement, GathersValuesByRank, 2) {
  EXPECT_THAT(gather_values(*group_of_all(*rank.world()), c10::kCPU, {rank.rank(), 7}),
              ElementsAre(ElementsAre(0, 7), ElementsAre(1, 7)));
  EXPECT_THAT(gather_values(*group_of_all(*rank.world()), c10::kCPU, {}),
              ElementsAre(IsEmpty(), IsEmpty()));
}

TEST_ON_RANKS(Agreement, GathersValuesOnHostsWithoutTraffic, 3) {
  const CommunicatorPtr group = group_of_all(*rank.world());
  const std::int64_t own = rank.rank() == 2 ? -1 : rank.rank();
  EXPECT_THAT(gather_on_hosts(*group, {own, 7}),
              ElementsAre(ElementsAre(0, 7), ElementsAre(1, 7), ElementsAre(-1, 7)));
  EXPECT_TRUE(rank.world()->traffic().table().empty());
}

TEST(Agreement, AssumesEqualValuesOnSimulatedRanks) {
  const CommunicatorPtr group = group_of_all(*fake_world(1, 3));
  EXPECT_THAT(gather_on_hosts(*group, {5}),
              ElementsAre(ElementsAre(5), ElementsAre(5), ElementsAre(5)));
}

TEST_ON_RANKS(Agreement, GathersTextsOfAnyLength, 3) {
  const std::vector<std::string> texts{"", std::string("a\0b", 3), "long enough to differ"};
  const std::string own = texts[static_cast<std::size_t>(rank.rank())];
  EXPECT_EQ(gather_texts(*group_of_all(*rank.world()), c10::kCPU, own), texts);
  EXPECT_THAT(gather_texts(*group_of_all(*rank.world()), c10::kCPU, ""), ElementsAre("", "", ""));
}

TEST_ON_RANKS(Agreement, SendsTextsOnlyIfTheyDiffer, 3) {
  const CommunicatorPtr group = group_of_all(*rank.world());
  EXPECT_THAT(texts_that_differ(*group, "alike"), IsEmpty());
  EXPECT_TRUE(rank.world()->traffic().table().empty());
  const std::string own = rank.rank() == 1 ? "" : "alike";
  EXPECT_THAT(texts_that_differ(*group, own), ElementsAre("alike", "", "alike"));
}

TEST_ON_RANKS(Agreement, NamesTheRanksThatDifferFromRank0, 4) {
  const std::int64_t own = rank.rank() % 2;
  EXPECT_THAT(ranks_that_differ(*group_of_all(*rank.world()), c10::kCPU, own), ElementsAre(1, 3));
  EXPECT_THAT(ranks_that_differ(*group_of_all(*rank.world()), c10::kCPU, 5), IsEmpty());
}

TEST_ON_RANKS(Agreement, TellsAllRanksOfTheFirstFailure, 3) {
  const auto group = group_of_all(*rank.world());
  const auto message_of = [&](const std::function<void()>& work) {
    const auto failure = first_failure(*group, c10::kCPU, work);
    return failure ? std::to_string(failure->rank) + ": " + failure->message : "";
  };
  EXPECT_EQ(message_of([] {}), "");
  EXPECT_EQ(message_of([&] {
              TESSERA_CHECK(rank.rank() == 0, "rank ", rank.rank(), " has no room\nto write");
            }),
            "1: rank 1 has no room");
  EXPECT_EQ(message_of([&] {
              if (rank.rank() == 1) {
                throw std::runtime_error("");
              }
            }),
            "1: an error without a message");
  EXPECT_NO_THROW(run_or_fail_together(*group, c10::kCPU, [] {}));
  EXPECT_ERROR(
      run_or_fail_together(*group, c10::kCPU, [&] { TESSERA_CHECK(rank.rank() != 1, "no room"); }),
      "no room");
}

}  // namespace
}  // namespace tessera::comm
