// Where ranks write down what they do, and the reader of that.
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <regex>

#include "launcher.h"
#include "tessera/core/detail/flight_report.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

/// What rank `rank` of 3 would have written that waits in a barrier.
void WriteRecord(const std::filesystem::path& folder, int rank) {
  const auto record = std::make_unique<flight::Record>();
  record->magic = flight::kMagic;
  record->bytes = sizeof(flight::Record);
  record->rank = rank;
  record->size = 3;
  record->groups[0].label.store({.name = {'d', 'p'}, .ranks = {'0', '-', '2'}});
  record->groups[0].id = 5;
  record->groups[0].begun = 2;
  flight::CallSlot& slot = record->calls[1];
  slot.label.store({.group = 5, .number = 1, .collective = {'b', 'a', 'r', 'r', 'i', 'e', 'r'}});
  slot.state = flight::CallState::kWaiting;
  slot.order = 1;
  WriteFile(folder / flight::record_name(0, rank),
            {reinterpret_cast<const char*>(record.get()), sizeof(flight::Record)});
}

TEST(LauncherRecords, AreInAFolderThatGoesWithAJobThatEndsWell) {
  const auto result = RunShell(2,
                               "[ -d $TESSERA_RUN_DIR ] && echo DIR=$TESSERA_RUN_DIR; touch "
                               "$TESSERA_RUN_DIR/world-0.rank-$RANK.flight");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
  const std::string folder = ValueOf(result.out, "DIR");
  EXPECT_CONTAINS(folder, "/tessera-run-");
  EXPECT_FALSE(std::filesystem::exists(folder));
}

TEST(LauncherRecords, AreKeptAndNamedIfTheJobFails) {
  const auto result = RunShell(2, "touch $TESSERA_RUN_DIR/world-0.rank-$RANK.flight; exit 3");
  std::smatch found;
  ASSERT_TRUE(std::regex_search(
      result.err, found, std::regex("what the ranks did last: tessera-run --explain (.*)\n")))
      << result.err;
  EXPECT_TRUE(std::filesystem::exists(found[1].str()));
  std::filesystem::remove_all(found[1].str());
}

TEST(LauncherRecords, OtherFilesAreNoReports) {
  EXPECT_EQ(RunShell(1, "touch $TESSERA_RUN_DIR/notes.txt").err, "");
  const TemporaryFolder folder;
  const auto reported = Launcher({"--run-dir", folder.path(), "sh", "-c",
                                  "touch $TESSERA_RUN_DIR/world-0.rank-0.txt"})
                            .wait();
  EXPECT_CONTAINS(reported.err, "what the ranks did last: tessera-run --explain ");
}

TEST(LauncherRecords, AreWhereTheyAreToBe) {
  const TemporaryFolder folder;
  const std::string given = (folder / "new" / "run").string();
  const auto result =
      Launcher({"--nproc", "1", "--run-dir", given, "--", "sh", "-c", "echo DIR=$TESSERA_RUN_DIR"})
          .wait();
  EXPECT_EQ(ValueOf(result.out, "DIR"), given);
  EXPECT_TRUE(std::filesystem::exists(given));
}

TEST(LauncherRecords, AreExplained) {
  const TemporaryFolder folder;
  WriteRecord(folder.path(), 0);
  WriteRecord(folder.path(), 2);
  const auto result = Launcher({"--explain", folder.path().string()}).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out,
            "records of 2 of 3 ranks\n"
            "  each of ranks 0, 2 waits in barrier (call 1 of group 'dp')\n"
            "  no record here of rank 1: copy those of all nodes into one folder\n");
}

TEST(LauncherRecords, AreNamedIfMissing) {
  const TemporaryFolder folder;
  const auto result = Launcher({"--explain", folder.path().string()}).wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err, "holds no flight records");
}

TEST(LauncherRecords, TimeLimitsReachTheRanks) {
  const auto result = Launcher({"--nproc", "1", "--timeout", "20", "--watchdog", "0.5", "--", "sh",
                                "-c", "echo T=$TESSERA_TIMEOUT; echo W=$TESSERA_WATCHDOG"})
                          .wait();
  EXPECT_EQ(ValueOf(result.out, "T"), "20");
  EXPECT_EQ(ValueOf(result.out, "W"), "0.5");
  const auto refused = Launcher({"--nproc", "1", "--timeout", "0", "--", "true"}).wait();
  EXPECT_EQ(refused.code, 2);
  EXPECT_CONTAINS(refused.err, "--timeout 0 is no number of seconds above 0");
}

}  // namespace
}  // namespace tessera::testing
