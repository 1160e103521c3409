#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>

#include "launcher.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

constexpr const char* kSpeak = "echo out $LOCAL_RANK; echo err $LOCAL_RANK >&2";

Result Speak(const std::vector<std::string>& options, const std::string& script = kSpeak) {
  std::vector<std::string> line{"--nproc", "2"};
  line.insert(line.end(), options.begin(), options.end());
  line.insert(line.end(), {"sh", "-c", script});
  return Launcher(line).wait();
}

/// The one folder that a job has made.
std::filesystem::path JobFolder(const std::filesystem::path& above) {
  const auto first = std::filesystem::directory_iterator(above);
  EXPECT_NE(first, std::filesystem::directory_iterator()) << "no folder in " << above;
  return first->path();
}

TEST(LauncherLogs, FolderAloneKeepsACopyOfAll) {
  const TemporaryFolder folder;
  const auto result = Speak({"--log-dir", folder.path() / "logs", "--rdzv-id", "run7"});
  EXPECT_CONTAINS(result.out, "out 0\n", "[rank 1] out 1\n");
  EXPECT_CONTAINS(result.err, "[rank 0] err 0\n", "[rank 1] err 1\n");
  const auto job = JobFolder(folder.path() / "logs");
  EXPECT_CONTAINS(result.err, "what the ranks print is written to " + job.string() + "\n");
  EXPECT_CONTAINS(job.filename().string(), "run7_");
  for (const std::string rank : {"0", "1"}) {
    EXPECT_EQ(ReadFile(job / "attempt_0" / rank / "stdout.log"), "out " + rank + "\n");
    EXPECT_EQ(ReadFile(job / "attempt_0" / rank / "stderr.log"), "err " + rank + "\n");
  }
}

TEST(LauncherLogs, RedirectsAreNotShown) {
  const TemporaryFolder folder;
  const auto result = Speak({"--log_dir", folder.path(), "--redirects", "0:3,1:2"});
  EXPECT_EQ(result.out, "[rank 1] out 1\n");
  EXPECT_EQ(result.err.find("err"), std::string::npos) << result.err;
  const auto ranks = JobFolder(folder.path()) / "attempt_0";
  EXPECT_EQ(ReadFile(ranks / "0" / "stdout.log"), "out 0\n");
  EXPECT_EQ(ReadFile(ranks / "0" / "stderr.log"), "err 0\n");
  EXPECT_EQ(ReadFile(ranks / "1" / "stderr.log"), "err 1\n");
  EXPECT_FALSE(std::filesystem::exists(ranks / "1" / "stdout.log"));
}

TEST(LauncherLogs, CopiedStreamsAreAlsoShown) {
  const TemporaryFolder folder;
  const auto result = Speak({"--log-dir", folder.path(), "-r", "1", "-t", "1:1"});
  EXPECT_EQ(result.out, "[rank 1] out 1\n");
  EXPECT_CONTAINS(result.err, "[rank 0] err 0\n");
  const auto ranks = JobFolder(folder.path()) / "attempt_0";
  EXPECT_EQ(ReadFile(ranks / "0" / "stdout.log"), "out 0\n");
  EXPECT_EQ(ReadFile(ranks / "1" / "stdout.log"), "out 1\n");
}

TEST(LauncherLogs, FailureShowsTheLastLineOfARedirectedRank) {
  const TemporaryFolder folder;
  const auto result = Speak({"--log-dir", folder.path(), "-r", "3"},
                            "[ $RANK = 0 ] || { echo cause >&2; exit 3; }; sleep 100");
  EXPECT_EQ(result.code, 3);
  EXPECT_CONTAINS(result.err, "rank 1 (pid ", "the last line of its standard error: cause\n");
}

TEST(LauncherLogs, EachStartOfTheJobHasAFolder) {
  const TemporaryFolder folder;
  const auto result =
      Speak({"--log-dir", folder.path(), "-r", "1", "--restarts", "1"}, "echo out; exit 3");
  EXPECT_EQ(result.code, 3);
  for (const char* start : {"attempt_0", "attempt_1"}) {
    EXPECT_EQ(ReadFile(JobFolder(folder.path()) / start / "1" / "stdout.log"), "out\n");
  }
}

TEST(LauncherLogs, FolderIsATemporaryOneWhereNoneIsGiven) {
  const TemporaryFolder folder;
  const auto result = Launcher({"-r", "1", "echo", "out"}, {{"TMPDIR", folder.path()}}).wait();
  EXPECT_EQ(result.out, "");
  const auto job = JobFolder(folder.path());
  EXPECT_CONTAINS(result.err, "is written to " + job.string() + "\n");
  EXPECT_EQ(ReadFile(job / "attempt_0" / "0" / "stdout.log"), "out\n");
}

TEST(LauncherLogs, FilterLeavesRanksOut) {
  const auto result = Speak({"--local-ranks-filter", "1"});
  EXPECT_EQ(result.out, "[rank 1] out 1\n");
  EXPECT_EQ(result.err, "[rank 1] err 1\n");
  EXPECT_EQ(Speak({"--local_ranks_filter=0"}).out, "out 0\n");
}

TEST(LauncherLogs, SaysWhatAFileLacks) {
  const TemporaryFolder folder;
  // A file that may have no byte stands for a full disk.
  const auto done = Launcher({"sh", "-c",
                              "trap '' XFSZ; ulimit -f 0; exec " + std::string(TESSERA_RUN) +
                                  " --log-dir $DIR -r 1 echo out 2>&1 | cat"},
                             {{"DIR", folder.path()}})
                        .wait();
  EXPECT_CONTAINS(done.out, "stdout.log lacks lines of its rank: File too large");
}

TEST(LauncherLogs, AFullFileMakesRoomForTheNext) {
  const TemporaryFolder folder;
  // 5 MiB in lines of 1 KiB: of files of 1 MiB the last three stay.
  const auto result = Launcher({"--log-dir", folder.path(), "--log-size", "1", "--redirects", "1",
                                "sh", "-c", "seq -f %01023.0f 5100"})
                          .wait();
  EXPECT_EQ(result.code, 0) << result.err;
  std::vector<int> lasts;
  for (const char* name : {"stdout.log", "stdout.log.1", "stdout.log.2"}) {
    const std::string text = ReadFile(JobFolder(folder.path()) / "attempt_0" / "0" / name);
    EXPECT_LE(text.size(), std::size_t{1} << 20) << name;
    ASSERT_GT(text.size(), 1024u) << name;
    lasts.push_back(std::stoi(text.substr(text.size() - 1024)));
  }
  EXPECT_EQ(lasts, (std::vector{5100, 4096, 3072}));
}

TEST(LauncherLogs, AnIdIsOneFolder) {
  const TemporaryFolder folder;
  EXPECT_EQ(Speak({"--log-dir", folder.path() / "logs", "--rdzv-id", "../a/b"}).code, 0);
  EXPECT_CONTAINS(JobFolder(folder.path() / "logs").filename().string(), ".._a_b_");
}

TEST(LauncherLogs, NamesATemporaryFolderThatIsNone) {
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"-r", "1", "true"}, std::vector<std::string>{"true"}}) {
    const auto result = Launcher(options, {{"TMPDIR", "/nonexistent"}}).wait();
    EXPECT_EQ(result.code, 2);
    EXPECT_CONTAINS(result.err, "TMPDIR=/nonexistent is no folder: correct it or give --");
  }
}

TEST(LauncherLogs, RefusesAFolderThatCannotBeMade) {
  const TemporaryFolder folder;
  WriteFile(folder / "plain", "text");
  const auto result = Speak({"--log-dir", folder.path() / "plain" / "logs"});
  EXPECT_EQ(result.code, 2);
  EXPECT_CONTAINS(result.err, "--log-dir ", "plain/logs cannot be made: Not a directory\n");
}

}  // namespace
}  // namespace tessera::testing
