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
    record_->rank = rank;
    record_->size = 3;
    record_->groups[0].ranks[0] = 0b111;
    record_->groups[0].id = kGroup;
  }

  Record& operator*() const { return *record_; }
  Record* operator->() const { return record_.get(); }

  void call(const std::string& text, bool waits) const {
    GroupSlot& group = record_->groups[0];
    group.number = group.begun++;
    group.call.store(text);
    group.waits = waits;
    group.since = 1;
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

TEST(ExplainRecords, NamesTheRankMissingFromACall) {
  const testing::TemporaryFolder folder;
  for (const int rank : {0, 1, 2}) {
    const RankRecord record(rank);
    record.call("set-up", false);
    if (rank != 1) {
      record.call("all_reduce for unit 'head'", true);
    }
    record.write(folder.path());
  }
  const auto lines = explain_records(folder.path());
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_CONTAINS(lines[0], "rank 0 of 3 waits in all_reduce for unit 'head', since ",
                  "not begun, or no record here: rank 1");
  EXPECT_CONTAINS(lines[1], "rank 1 of 3 is outside of collectives, after set-up, since ");
}

TEST(ExplainRecords, NamesARankWithoutARecord) {
  const testing::TemporaryFolder folder;
  for (const int rank : {0, 1}) {
    const RankRecord record(rank);
    record.call("barrier", true);
    record->state = rank == 0 ? RankState::kGaveUp : RankState::kRunning;
    record.write(folder.path());
  }
  const auto lines = explain_records(folder.path());
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_CONTAINS(lines[0], "rank 0 of 3 gave up in barrier", "no record here: rank 2");
  EXPECT_CONTAINS(lines[1], "rank 1 of 3 waits in barrier", "no record here: rank 2");
}

TEST(FlightRecord, DescribesTheStateOfTheRank) {
  const RankRecord record(0);
  EXPECT_EQ(what_it_does(*record), "is outside of collectives, before its first collective");
  record.call("all_gather", true);
  EXPECT_EQ(what_it_does(*record), "waits in all_gather");
  record.call(std::string(300, 'x'), false);
  EXPECT_EQ(what_it_does(*record), "is outside of collectives, after " + std::string(192, 'x'));
  record->groups[1].id = 7;
  record->groups[1].begun = 1;
  record->groups[1].call.store("barrier");
  record->groups[1].waits = true;
  record->step = 20;
  EXPECT_EQ(what_it_does(*record), "waits in barrier, after step 20");
  EXPECT_EQ(what_it_does(*record, /*alive=*/false), "died in barrier, after step 20");
  record->state = RankState::kEnded;
  EXPECT_EQ(what_it_does(*record), "ended in barrier, after step 20");
}

TEST(ExplainRecords, NamesUnreadableRecords) {
  const testing::TemporaryFolder folder;
  EXPECT_ERROR(explain_records(folder.path() / "none"), "none cannot be read");
  EXPECT_ERROR(explain_records(folder.path()), "holds no flight records");
  testing::WriteFile(folder / record_name(0, 0), "something else");
  EXPECT_ERROR(explain_records(folder.path()), "world-0.rank-0.flight is not a flight record");
}

}  // namespace
}  // namespace tessera::flight
