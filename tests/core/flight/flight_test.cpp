// Tests the text that `tessera-run --explain` prints for the flight records of several ranks.
#include "tessera/core/detail/flight_record.h"

#include <memory>

#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::flight {
namespace {

/// The flight record of a rank, in a job with three ranks and one process group.
class RankRecord {
 public:
  explicit RankRecord(int rank) {
    record_->magic = kMagic;
    record_->bytes = sizeof(Record);
    record_->rank = rank;
    record_->size = 3;
    record_->groups[0].name = {'d', 'p'};
    record_->groups[0].ranks[0] = 0b111;
    record_->groups[0].id = kGroup;
  }

  Record& operator*() const { return *record_; }
  Record* operator->() const { return record_.get(); }

  void call(const std::string& collective, bool waits, const std::string& purpose = "") const {
    const std::uint64_t order = ++record_->calls_begun;
    CallSlot& slot = record_->calls[order % kCalls];
    slot.label.store({.group = kGroup,
                      .number = record_->groups[0].begun++,
                      .collective = padded<sizeof(CallLabel::collective)>(collective),
                      .purpose = padded<sizeof(CallLabel::purpose)>(purpose),
                      .caller = padded<sizeof(CallLabel::caller)>("full_tensor")});
    slot.waits = waits;
    slot.since = 1;
    slot.order = order;
  }

  void write(const std::filesystem::path& folder) const {
    testing::WriteFile(folder / record_name(0, record_->rank),
                       {reinterpret_cast<const char*>(record_.get()), sizeof(Record)});
  }

 private:
  static constexpr std::uint64_t kGroup = 5;
  std::unique_ptr<Record> record_ = std::make_unique<Record>();
};

TEST(NameRanks, JoinsRunsOfThreeAndMore) {
  const std::vector<std::pair<std::vector<int>, std::string>> cases = {
      {{5}, "rank 5"},
      {{0, 1}, "ranks 0, 1"},
      {{0, 1, 2, 3}, "ranks 0-3"},
      {{0, 2, 4, 9, 10, 11}, "ranks 0, 2, 4, 9-11"},
      {{3, 1, 0}, "ranks 3, 1, 0"}};
  for (const auto& [ranks, text] : cases) {
    EXPECT_EQ(name_ranks(ranks), text);
  }
}

TEST(Explain, HasALineForRanksThatDoTheSameAndNamesTheMissingRank) {
  const testing::TemporaryFolder folder;
  for (const int rank : {0, 1, 2}) {
    const RankRecord record(rank);
    record.call("set-up", false);
    if (rank != 1) {
      record.call("all_reduce", true, "unit 'head'");
    }
    record.write(folder.path());
  }
  const auto lines = explain_records(folder.path());
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[0], "records of 3 of 3 ranks");
  EXPECT_CONTAINS(lines[1],
                  "each of ranks 0, 2 waits in all_reduce for unit 'head' (call 1 of group 'dp'), "
                  "called by full_tensor; that call was not begun by rank 1, since ");
  EXPECT_CONTAINS(lines[2],
                  "rank 1 is outside of collectives, after the set-up of group 'dp', called by");
}

TEST(Explain, NamesARankWithAnotherCollective) {
  const testing::TemporaryFolder folder;
  for (const int rank : {0, 1}) {
    const RankRecord record(rank);
    record.call(rank == 0 ? "all_reduce" : "barrier", true);
    record->state = rank == 0 ? RankState::kGaveUp : RankState::kRunning;
    record.write(folder.path());
  }
  const auto lines = explain_records(folder.path());
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_CONTAINS(lines[1], "rank 0 gave up after the set-up of group 'dp'",
                  "look for its error; that call was not begun by rank 1");
  EXPECT_CONTAINS(lines[3], "no record here of rank 2: copy those of all nodes into one folder");
}

TEST(Record, KeepsTheLastCalls) {
  const RankRecord record(0);
  EXPECT_EQ(what_it_does(*record), "is outside of collectives, before its first collective");
  for (std::size_t i = 0; i < 2 * kCalls; ++i) {
    record.call("all_reduce", false, std::string(100, '-') + "'x'");
  }
  EXPECT_FALSE(find_call(*record, 5, kCalls - 1));
  ASSERT_TRUE(find_call(*record, 5, kCalls));
  EXPECT_TRUE(unpadded(find_call(*record, 5, kCalls)->label.purpose).ends_with("-'x'"))
      << "the end of a name is kept";
  record->step = 20;
  EXPECT_EQ(progress_text(*record), "after step 20");
  record->state = RankState::kEnded;
  EXPECT_EQ(what_it_does(*record), "ended after step 20");
}

TEST(Records, AreNamedWhenUnreadable) {
  const testing::TemporaryFolder folder;
  EXPECT_ERROR(explain_records(folder.path() / "none"), "none cannot be read");
  EXPECT_ERROR(explain_records(folder.path()), "holds no flight records");
  testing::WriteFile(folder / record_name(0, 0), "something else");
  EXPECT_ERROR(explain_records(folder.path()), "world-0.rank-0.flight is no flight record");
}

}  // namespace
}  // namespace tessera::flight
