// The report that is made from the flight records of several ranks.
#include "tessera/core/detail/flight_report.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <memory>

#include "tessera/core/flight.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::flight {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

/// Builds the report of a rank call by call.
class Ranks {
 public:
  explicit Ranks(int size) {
    for (int rank = 0; rank < size; ++rank) {
      reports_.push_back({.rank = rank, .size = size});
    }
  }

  /// Adds the next call of a group, on rank `rank`.
  void call(int rank, const std::vector<int>& ranks, const std::string& collective,
            CallState state = CallState::kDone, std::int64_t thread = 0) {
    RankReport& report = reports_[static_cast<std::size_t>(rank)];
    const std::string name = ranks_text(ranks);
    const std::uint64_t id = std::hash<std::string>()(name);
    if (report.find_group(id) == nullptr) {
      report.groups.push_back({.id = id, .name = name, .ranks = ranks});
    }
    for (Group& group : report.groups) {
      if (group.id == id) {
        const bool same = group.thread == thread || group.begun == 0;
        group.thread = same ? thread : kSeveralThreads;
        report.calls.push_back({.order = ++report.calls_begun,
                                .group = id,
                                .number = group.begun++,
                                .thread = thread,
                                .group_name = name,
                                .collective = collective,
                                .state = state,
                                .begun = kSecond,
                                .waits_since = kSecond});
      }
    }
  }

  void all_call(const std::vector<int>& ranks, const std::string& collective) {
    for (const int rank : ranks) {
      call(rank, ranks, collective);
    }
  }

  RankReport& operator[](int rank) { return reports_[static_cast<std::size_t>(rank)]; }
  const std::vector<RankReport>& reports() const { return reports_; }

 private:
  std::vector<RankReport> reports_;
};

const std::vector<int> kAll = {0, 1, 2};

TEST(RankRanges, AreShortAndCanBeReadBack) {
  const std::vector<std::pair<std::vector<int>, std::string>> cases = {
      {{}, ""},
      {{5}, "5"},
      {{0, 1}, "0, 1"},
      {{0, 1, 2, 3}, "0-3"},
      {{0, 2, 4, 9, 10}, "0-4/2, 9, 10"},
      {{3, 1, 0}, "3, 1, 0"}};
  for (const auto& [ranks, text] : cases) {
    EXPECT_EQ(ranks_text(ranks), text);
    EXPECT_EQ(parse_ranks(text), ranks);
  }
  EXPECT_EQ(parse_ranks("0-3, x"), (std::vector<int>{0, 1, 2, 3}));
}

constexpr std::int64_t kMainThread = 1, kOtherThread = 2;

TEST(LastWork, CountsTheThreadsThatMakeTheCallsOfTheGroup) {
  Ranks ranks(2);
  ranks[1].threads = {{.id = kMainThread},
                      {.id = kOtherThread, .worked = 5, .work = Work::kWriting}};
  ranks.call(1, {0, 1}, "all_reduce", CallState::kDone, kMainThread);
  const std::uint64_t group = ranks[1].groups.front().id;
  EXPECT_EQ(last_work(ranks[1], group), 0) << "the main thread does not work";
  ranks.call(1, {0, 1}, "all_reduce", CallState::kDone, kOtherThread);
  EXPECT_EQ(last_work(ranks[1], group), 5);
  EXPECT_CONTAINS(what_it_does(ranks[1], ranks.reports()), "; since then it has written files");
}

TEST(Explain, HasALineForRanksThatDoTheSame) {
  Ranks ranks(3);
  ranks.all_call(kAll, "set-up");
  ranks.call(0, kAll, "all_reduce", CallState::kWaiting);
  ranks.call(2, kAll, "all_reduce", CallState::kWaiting);
  ranks[1].activity = Activity::kStopped;
  ranks[1].pid = getpid();  // advice is given only for a process that exists
  const std::vector<std::string> lines = explain(ranks.reports(), 3 * kSecond);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(
      lines[0],
      "each of ranks 0, 2 waits in all_reduce (call 1 of group '0-2'), for rank 1, for 2.0 s");
  EXPECT_CONTAINS(lines[1], "rank 1 is stopped (by SIGSTOP",
                  "kill -CONT " + std::to_string(getpid()), "after the set-up of group '0-2'");
}

TEST(ExitReason, SaysHowARankEnded) {
  RankReport report{.rank = 1, .pid = 7};
  EXPECT_EQ(exit_reason(report), "");
  report.activity = Activity::kGone;
  EXPECT_EQ(exit_reason(report),
            "the process of rank 1 (pid 7) has ended before its first collective; look for its "
            "error");
  report.step = 20;
  report.state = RankState::kEnded;
  EXPECT_EQ(exit_reason(report),
            "rank 1 ended after step 20; every rank must make this call before World::shutdown()");
  report.state = RankState::kExited;
  report.exit_code = 3;
  EXPECT_EQ(exit_reason(report), "rank 1 ended with exit code 3 after step 20; look for its error");
  report.state = RankState::kGaveUp;
  EXPECT_EQ(exit_reason(report), "rank 1 gave up after step 20; look for its error");
}

/// A record with one group and its calls `first` to `last`.
void write_record(const std::filesystem::path& folder, int rank, std::uint64_t first,
                  std::uint64_t last, int size = 2) {
  const auto record = std::make_unique<Record>();
  record->magic = kMagic;
  record->bytes = sizeof(Record);
  record->rank = rank;
  record->size = size;
  GroupLabel group;
  group.name = padded<sizeof group.name>("dp");
  group.ranks = padded<sizeof group.ranks>("0, 1");
  record->groups[0].label.store(group);
  record->groups[0].id = 5;
  record->groups[0].begun = last + 1;
  for (std::uint64_t number = first; number <= last; ++number) {
    CallSlot& slot = record->calls[number % kCalls];
    slot.label.store(
        {.group = 5,
         .number = number,
         .begun = static_cast<std::int64_t>(number),
         .collective = padded<sizeof(CallLabel::collective)>("all_reduce"),
         .purpose = padded<sizeof(CallLabel::purpose)>(std::string(100, '-') + "'x'")});
    slot.order = number + 1;
  }
  testing::WriteFile(folder / record_name(0, rank),
                     {reinterpret_cast<const char*>(record.get()), sizeof(Record)});
}

TEST(Records, AreReadFromAFolder) {
  const testing::TemporaryFolder folder;
  write_record(folder.path(), 1, 1, 3);
  write_record(folder.path(), 0, 2000, 2000 + kCalls - 1);
  const auto worlds = read_records(folder.path());
  ASSERT_EQ(worlds.size(), 1U);
  ASSERT_EQ(worlds[0].size(), 2U);
  EXPECT_EQ(worlds[0][0].rank, 0);
  EXPECT_EQ(worlds[0][0].calls.front().number, 2000U);
  EXPECT_EQ(worlds[0][0].calls.back().number, 2000U + kCalls - 1);
  EXPECT_EQ(worlds[0][0].groups.front().ranks, (std::vector<int>{0, 1}));
  ASSERT_EQ(worlds[0][1].calls.size(), 3U);
  EXPECT_TRUE(worlds[0][1].calls[0].purpose.ends_with("-'x'")) << "the end of a name is kept";
}

/// The record of a stopped process of this host.
void write_stopped(const std::filesystem::path& folder, pid_t pid) {
  const auto record = std::make_unique<Record>();
  record->magic = kMagic;
  record->bytes = sizeof(Record);
  record->size = 1;
  record->pid = pid;
  record->activity = Activity::kStopped;
  std::array<char, sizeof(Record::host)> host{};
  gethostname(host.data(), host.size() - 1);
  record->host = padded<sizeof(Record::host)>(host.data());
  testing::WriteFile(folder / record_name(0, 0),
                     {reinterpret_cast<const char*>(record.get()), sizeof(Record)});
}

TEST(Records, GiveNoAdviceForAProcessThatIsGone) {
  const testing::TemporaryFolder folder;
  write_stopped(folder.path(), getpid());
  EXPECT_CONTAINS(explain_records(folder.path())[1], "kill -CONT ");
  const pid_t gone = fork();
  if (gone == 0) {
    _exit(0);
  }
  waitpid(gone, nullptr, 0);
  write_stopped(folder.path(), gone);
  EXPECT_CONTAINS(explain_records(folder.path())[1], "(by SIGSTOP, Ctrl-Z or a debugger), before");
}

TEST(Records, AreNamedWhenUnreadable) {
  const testing::TemporaryFolder folder;
  EXPECT_ERROR(read_records(folder.path() / "none"), "none cannot be read");
  EXPECT_ERROR(read_records(folder.path()), "holds no flight records");
  testing::WriteFile(folder / record_name(0, 0), "something else");
  EXPECT_ERROR(read_records(folder.path()), "world-0.rank-0.flight is no flight record");
}

}  // namespace
}  // namespace tessera::flight
