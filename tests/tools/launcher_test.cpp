#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tessera/core/detail/flight_record.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kLongestRun = 60s;

/// How a run of tessera-run ended, and what the run printed.
struct Result {
  int code = -1;   ///< `code`: exit code; -1 after a signal
  int signal = 0;  ///< `signal`: the signal that ended the launcher, or 0
  std::string out;
  std::string err;
  std::chrono::duration<double> took{};
};

[[noreturn]] void become_launcher(const std::vector<std::string>& arguments,
                                  const std::map<std::string, std::string>& variables) {
  for (const auto& [name, value] : variables) {
    setenv(name.c_str(), value.c_str(), 1);
  }
  std::vector<char*> words{const_cast<char*>(TESSERA_RUN)};
  for (const auto& argument : arguments) {
    words.push_back(const_cast<char*>(argument.c_str()));
  }
  words.push_back(nullptr);
  execv(TESSERA_RUN, words.data());
  _exit(99);
}

bool read_into(int fd, std::string& text) {
  std::array<char, 4096> buffer;
  const auto size = read(fd, buffer.data(), buffer.size());
  if (size > 0) {
    text.append(buffer.data(), static_cast<std::size_t>(size));
  }
  return size > 0;
}

/// Returns the content of /proc/PROCESS/NAME, or "" if the process has ended.
std::string file_of_process(const std::string& process, const char* name) {
  std::ostringstream text;
  text << std::ifstream("/proc/" + process + "/" + name, std::ios::binary).rdbuf();
  return text.str();
}

bool is_zombie(const std::string& process) {
  const auto status = file_of_process(process, "stat");
  const auto paren = status.rfind(')');
  return paren == std::string::npos || status.compare(paren, 3, ") Z") == 0;
}

/// A run of tessera-run. All its processes inherit an environment variable with a unique value, by
/// which left_over() finds processes that have not ended.
class Launcher {
 public:
  using Variables = std::map<std::string, std::string>;

  explicit Launcher(const std::vector<std::string>& arguments, const Variables& variables = {})
      : start_(Clock::now()) {
    static int count = 0;
    mark_ = "TESSERA_TEST_MARK=" + std::to_string(getpid()) + "." + std::to_string(++count) + ".";
    auto all = variables;
    all["TESSERA_TEST_MARK"] = mark_.substr(mark_.find('=') + 1);
    int out[2];
    int err[2];
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) {
      throw std::runtime_error("cannot make a pipe");
    }
    pid_ = fork();
    if (pid_ == 0) {
      dup2(out[1], STDOUT_FILENO);
      dup2(err[1], STDERR_FILENO);
      become_launcher(arguments, all);
    }
    close(out[1]);
    close(err[1]);
    out_ = out[0];
    err_ = err[0];
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  ~Launcher() {
    stop_reading();
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    for (const pid_t pid : marked()) {
      kill(pid, SIGKILL);
    }
  }

  pid_t pid() const { return pid_; }
  /// Collects the launcher's output until the launcher ends. After 60 s, kills the launcher and
  /// fails the test.
  Result wait() {
    Result result;
    bool reading = out_ >= 0;
    while (reading && Clock::now() - start_ < kLongestRun) {
      std::array<pollfd, 2> ready{pollfd{out_, POLLIN, 0}, pollfd{err_, POLLIN, 0}};
      poll(ready.data(), ready.size(), 1000);
      if (ready[0].revents != 0 && !read_into(out_, result.out)) {
        close(std::exchange(out_, -1));
      }
      if (ready[1].revents != 0 && !read_into(err_, result.err)) {
        close(std::exchange(err_, -1));
      }
      reading = out_ >= 0 || err_ >= 0;
    }
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      if (Clock::now() - start_ > kLongestRun) {
        ADD_FAILURE() << "tessera-run did not end";
        kill(pid_, SIGKILL);
      }
      std::this_thread::sleep_for(5ms);
    }
    pid_ = -1;
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    result.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    result.took = Clock::now() - start_;
    return result;
  }
  /// Closes the read ends of the launcher's pipes, so that later writes of the launcher fail.
  void stop_reading() {
    for (int* fd : {&out_, &err_}) {
      if (*fd >= 0) {
        close(std::exchange(*fd, -1));
      }
    }
  }
  /// Waits up to `grace` for the end of the job's processes. Returns processes that still run.
  std::vector<pid_t> left_over(std::chrono::milliseconds grace = 2s) const {
    const auto end = Clock::now() + grace;
    auto pids = marked();
    while (!pids.empty() && Clock::now() < end) {
      std::this_thread::sleep_for(10ms);
      pids = marked();
    }
    return pids;
  }

 private:
  std::vector<pid_t> marked() const {
    std::vector<pid_t> pids;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const auto name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos || is_zombie(name)) {
        continue;
      }
      if (file_of_process(name, "environ").find(mark_) != std::string::npos) {
        pids.push_back(std::stoi(name));
      }
    }
    return pids;
  }

  std::string mark_;
  pid_t pid_ = -1;
  int out_ = -1;
  int err_ = -1;
  std::chrono::steady_clock::time_point start_;
};

std::vector<std::string> Shell(int ranks, const std::string& script) {
  return {"--nproc", std::to_string(ranks), "--", "sh", "-c", script};
}

Result RunShell(int ranks, const std::string& script, const Launcher::Variables& variables = {}) {
  return Launcher(Shell(ranks, script), variables).wait();
}

Result RunAround(const std::string& script) {
  return Launcher({"sh", "-c", script}, {{"RUN", TESSERA_RUN}}).wait();
}

/// Waits until the file exists, possibly without content. Fails the test after 30 s.
void WaitForFile(const std::string& path) {
  const auto end = Clock::now() + 30s;
  while (!std::filesystem::exists(path)) {
    ASSERT_LT(Clock::now(), end) << path << " never came";
    std::this_thread::sleep_for(5ms);
  }
}

/// Returns the value of `name` from the line "name=value" in `text`; "(none)" without such a line.
std::string ValueOf(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, name.size() + 1, name + "=") == 0) {
      return line.substr(name.size() + 1);
    }
  }
  return "(none)";
}

TEST(LauncherEnvironment, ContainsRankAndWorldSizeAndAStoreSocket) {
  const auto out = RunShell(3,
                            "echo $RANK/$LOCAL_RANK/$WORLD_SIZE/$LOCAL_WORLD_SIZE; "
                            "echo STORE=$TESSERA_STORE_FD; ls -l /proc/$$/fd | grep -c socket || :")
                       .out;
  EXPECT_CONTAINS(out, "0/0/3/3\n", "[rank 1] 1/1/3/3\n", "[rank 2] 2/2/3/3\n");
  EXPECT_GT(std::stoi(ValueOf(out, "STORE")), STDERR_FILENO);
  EXPECT_CONTAINS(out, "[rank 1] STORE=\n", "[rank 1] 0\n");
}

TEST(LauncherEnvironment, DividesCoresAmongRanks) {
  const int ranks = static_cast<int>(std::thread::hardware_concurrency()) + 1;
  const auto out = RunShell(ranks, "echo OMP=$OMP_NUM_THREADS", {{"OMP_NUM_THREADS", ""}}).out;
  EXPECT_EQ(ValueOf(out, "OMP"), "1");
}

TEST(LauncherEnvironment, OverridesAnOuterJobAndKeepsOtherVariables) {
  const TemporaryFolder folder;
  const std::string given = (folder / "new" / "run").string();
  const auto run = Launcher({"--nproc=1", "--timeout", "20", "--watchdog", "0.5", "--run-dir",
                             given, "--", "env"},
                            {{"RANK", "9"},
                             {"WORLD_SIZE", "16"},
                             {"MASTER_PORT", "1"},
                             {"OMP_NUM_THREADS", "7"},
                             {"SOME_WORD", "a=b c"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"}})
                       .wait();
  EXPECT_EQ(run.code, 0) << run.err;
  for (const auto& [name, value] : Launcher::Variables{{"RANK", "0"},
                                                       {"WORLD_SIZE", "1"},
                                                       {"MASTER_ADDR", "127.0.0.1"},
                                                       {"OMP_NUM_THREADS", "7"},
                                                       {"SOME_WORD", "a=b c"},
                                                       {"TORCHELASTIC_USE_AGENT_STORE", "(none)"},
                                                       {"TORCHELASTIC_RESTART_COUNT", "(none)"},
                                                       {"TESSERA_TIMEOUT", "20"},
                                                       {"TESSERA_WATCHDOG", "0.5"},
                                                       {"TESSERA_RUN_DIR", given}}) {
    EXPECT_EQ(ValueOf(run.out, name), value) << name;
  }
  EXPECT_NE(ValueOf(run.out, "MASTER_PORT"), "1");
  EXPECT_TRUE(std::filesystem::exists(given));
}

TEST(LauncherEnvironment, PassesArgumentsUnchanged) {
  const auto out =
      Launcher({"--nproc", "1", "--", "printf", "<%s>", "a b", "--nproc", "", "--", "*"})
          .wait()
          .out;
  EXPECT_EQ(out, "<a b><--nproc><><--><*>");
}

TEST(LauncherEnvironment, GivesStandardInputOnlyToRankZero) {
  const auto out = RunAround("printf 'a\\nb\\n' | $RUN --nproc 2 sh -c 'echo $RANK $(cat)'").out;
  EXPECT_CONTAINS(out, "0 a b\n", "[rank 1] 1\n");
}

TEST(LauncherOutput, PrefixesLinesWithTheRank) {
  EXPECT_EQ(RunShell(1, "printf 'step 1\\rstep 2'").out, "step 1\rstep 2");
  const auto result = RunShell(2, "[ $RANK = 0 ] || printf out; echo err of $RANK >&2");
  EXPECT_EQ(result.out, "[rank 1] out\n");
  EXPECT_CONTAINS(result.err, "[rank 0] err of 0\n", "[rank 1] err of 1\n");
}

TEST(LauncherOutput, KeepsLinesIntactAndComplete) {
  const auto out = RunShell(4, "for i in $(seq 1 2000); do echo abcdefghij; done").out;
  std::size_t lines = 0;
  for (std::size_t start = 0; start < out.size(); ++lines) {
    const auto end = out.find('\n', start);
    const auto line = out.substr(start, end - start);
    ASSERT_EQ(line.front() == '[' ? line.substr(line.find(' ', 6) + 1) : line, "abcdefghij");
    start = end + 1;
  }
  EXPECT_EQ(lines, 4U * 2000);
  const auto large = RunShell(2, "[ $RANK = 0 ] || head -c 3000000 /dev/zero | tr '\\0' x").out;
  EXPECT_EQ(std::count(large.begin(), large.end(), 'x'), 3'000'000);
}

TEST(LauncherOutput, FailsTheJobIfUnwritable) {
  for (const auto& [where, code] : {std::pair("/dev/full", "1\n"), std::pair("/dev/null", "0\n")}) {
    const auto result = RunAround("$RUN --nproc 2 sh -c '[ $RANK = 0 ] || echo out' >" +
                                  std::string(where) + "; echo $?");
    EXPECT_EQ(result.out, code) << where;
  }
}

TEST(LauncherOutput, NeedsNoStandardStreams) {
  for (const char* closed : {"<&-", ">&-", "2>&-", "<&- >&- 2>&-"}) {
    const auto run = RunAround("timeout -s KILL 5 $RUN --nproc 2 sh -c 'echo out; exit 0' " +
                               std::string(closed) + "; echo code $?");
    EXPECT_CONTAINS(run.out, "code 0\n") << closed;
  }
}

struct End {
  const char* name;
  int ranks;
  const char* script;
  int code;
  const char* word;  ///< text that standard error must contain
};

class LauncherEnd : public ::testing::TestWithParam<End> {};

TEST_P(LauncherEnd, ReturnsTheExitCodeAndLeavesNoProcess) {
  const End& end = GetParam();
  Launcher launcher(Shell(end.ranks, end.script));
  const auto result = launcher.wait();
  EXPECT_EQ(result.code, end.code) << result.err;
  EXPECT_CONTAINS(result.err, end.word);
  EXPECT_LT(result.took.count(), 5);
  EXPECT_TRUE(launcher.left_over().empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, LauncherEnd,
    ::testing::Values(
        End{"Success", 3, "[ $RANK = 0 ] || sleep 0.3", 0, ""},
        End{"Failure", 3, "[ $RANK != 1 ] || exit 7; sleep 100", 7, "rank 1 (pid "},
        End{"Signal", 2, "[ $RANK != 1 ] || kill -9 $$; sleep 100", 137, "killed by SIGKILL"},
        End{"Stopped", 2, "exit 75", 75, ""},
        End{"NoNewline", 1, "printf 'last words' >&2; exit 1", 1, "[rank 0] last words\n"},
        End{"IgnoresSigterm", 3, "[ $RANK != 2 ] || exit 5; trap '' TERM; while :; do :; done", 5,
            "rank 2 (pid "},
        End{"Children", 2, "sleep 1000 & [ $RANK = 0 ] || exit 5; wait", 5, "rank 1 (pid "},
        End{"ChildrenLeft", 2, "sleep 1000 & exit 0", 0, ""}),
    [](const auto& info) { return info.param.name; });

TEST(LauncherEnd, PrintsErrorsBeforeTheNameOfTheFailedRank) {
  const auto result =
      RunShell(3,
               "[ $RANK != 1 ] || { printf 'first\\ncause\\n' >&2; exit 1; }; "
               "trap 'echo witness >&2; exit 1' TERM; while :; do sleep 0.05; done");
  EXPECT_CONTAINS(result.err, "[rank 1] first\n[rank 1] cause\ntessera-run: rank 1 (pid ");
  EXPECT_LT(result.err.find("tessera-run: rank 1"), result.err.find("witness")) << result.err;
}

TEST(LauncherCommandLine, RefusesInvalidArguments) {
  struct BadLine {
    std::vector<std::string> arguments;
    int code;
    const char* word;
  };
  const BadLine lines[] = {{{"--nproc", "2"}, 2, "--nproc N PROGRAM"},
                           {{"--nproc", "2", "--"}, 2, "no program"},
                           {{"--nproc"}, 2, "--nproc"},
                           {{"--explain", ""}, 2, "--explain"},
                           {{"--nproc", "-1", "true"}, 2, "--nproc -1"},
                           {{"--nproc", "two", "true"}, 2, "--nproc two"},
                           {{"--nproc", "2.5", "true"}, 2, "--nproc 2.5"},
                           {{"--timeout", "0", "true"}, 2, "--timeout 0"},
                           {{"--nnodes", "2", "true"}, 2, "torchrun"},
                           {{"no-such-program"}, 127, "no-such-program"},
                           {{"/etc/passwd"}, 126, "/etc/passwd"}};
  for (const BadLine& line : lines) {
    const auto result = Launcher(line.arguments).wait();
    EXPECT_EQ(result.code, line.code) << line.word;
    EXPECT_CONTAINS(result.err, line.word);
  }
}

// Each rank creates a file when it has started. The tests wait for the files of all ranks.
class LauncherSignal : public ::testing::Test {
 protected:
  std::vector<std::string> Job(int ranks, const std::string& script,
                               const std::string& prepare = ":") {
    return Shell(ranks, prepare + "; : > '" + (folder_ / "up").string() + "'.$RANK; " + script);
  }
  void WaitForRanks(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      WaitForFile((folder_ / "up").string() + "." + std::to_string(rank));
    }
  }
  static constexpr auto kLoop = "while :; do sleep 0.05; done";

  TemporaryFolder folder_;
};

class LauncherStop : public LauncherSignal, public ::testing::WithParamInterface<int> {};

TEST_P(LauncherStop, EndsTheJob) {
  Launcher launcher(Job(3, "sleep 1000 & wait"));
  WaitForRanks(3);
  kill(launcher.pid(), GetParam());
  EXPECT_EQ(launcher.wait().code, 128 + GetParam());
  EXPECT_TRUE(launcher.left_over().empty());
}

INSTANTIATE_TEST_SUITE_P(All, LauncherStop, ::testing::Values(SIGINT, SIGTERM, SIGHUP, SIGQUIT),
                         [](const auto& info) {
                           return std::string("SIG") + sigabbrev_np(info.param);
                         });

TEST_F(LauncherSignal, GivesRanksAGracePeriod) {
  for (const auto& [grace, code] : {std::pair("0.2", 128 + SIGTERM), std::pair("30", 75)}) {
    auto arguments = Job(1, kLoop, "trap 'sleep 1; echo saved; exit 75' TERM");
    arguments.insert(arguments.begin(), {"--grace", grace});
    Launcher launcher(arguments);
    WaitForRanks(1);
    std::filesystem::remove((folder_ / "up").string() + ".0");
    kill(launcher.pid(), SIGTERM);
    const auto result = launcher.wait();
    EXPECT_EQ(result.code, code) << grace;
    EXPECT_LT(result.took.count(), 10);
  }
}

TEST_F(LauncherSignal, KillsAtTheSecondSignal) {
  const auto told = (folder_ / "told").string();
  Launcher launcher(Job(2, kLoop, "trap ': > " + told + "' INT"));
  WaitForRanks(2);
  kill(launcher.pid(), SIGINT);
  WaitForFile(told);
  kill(launcher.pid(), SIGINT);
  const auto result = launcher.wait();
  EXPECT_EQ(result.code, 128 + SIGINT);
  EXPECT_LT(result.took.count(), 4);
  EXPECT_TRUE(launcher.left_over().empty());
}

// SIGUSR1 would end a rank without a handler, so the launcher waits for the rank's handler.
TEST_F(LauncherSignal, ForwardsUserSignalsToRanksWithAHandler) {
  Launcher launcher(Job(2, std::string("sleep 0.5; trap 'echo noted; exit 0' USR1; ") + kLoop));
  WaitForRanks(2);
  kill(launcher.pid(), SIGUSR1);
  const auto result = launcher.wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_CONTAINS(result.out, "noted\n", "[rank 1] noted\n");
}

TEST_F(LauncherSignal, KillOfTheLauncherEndsAllRanks) {
  Launcher launcher(Job(3, kLoop, "trap '' HUP INT TERM"));
  WaitForRanks(3);
  kill(launcher.pid(), SIGKILL);
  EXPECT_EQ(launcher.wait().signal, SIGKILL);
  EXPECT_TRUE(launcher.left_over().empty());
}

TEST_F(LauncherSignal, DoesNotWaitForAStalledReader) {
  Launcher launcher(Job(2,
                        "[ $RANK = 0 ] || { sleep 0.5; exit 6; }; "
                        "while :; do echo 0123456789012345678901234567890123456789 >&2; done"));
  WaitForRanks(2);
  // Waits until both ranks have ended. The launcher still runs, because nobody reads its output.
  while (launcher.left_over(std::chrono::milliseconds(0)).size() > 1) {
    usleep(5'000);
  }
  const auto result = launcher.wait();
  EXPECT_EQ(result.code, 6);
  EXPECT_CONTAINS(result.err, "rank 1 (pid ");
}

TEST_F(LauncherSignal, OutlivesItsReader) {
  Launcher launcher(
      Job(2, "for i in $(seq 1 50); do [ $RANK = 0 ] || echo text; sleep 0.01; done"));
  launcher.stop_reading();
  EXPECT_EQ(launcher.wait().code, 0);
}

// Rank 0 has the terminal; other ranks have none. Ctrl-C must end the whole job.
TEST(LauncherTerminal, BelongsToRankZeroAndAcceptsCtrlC) {
  int terminal = -1;
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (pid == 0) {
    execl(TESSERA_RUN, TESSERA_RUN, "--nproc", "2", "--", "sh", "-c",
          "test -t 1 && echo rank $RANK has a terminal; sleep 1000", nullptr);
    _exit(99);
  }
  std::string seen;
  char buffer[256];
  bool typed = false;
  for (ssize_t size; (size = read(terminal, buffer, sizeof buffer)) > 0;) {
    seen.append(buffer, static_cast<std::size_t>(size));
    if (!typed && seen.find("rank 0 has a terminal") != std::string::npos) {
      typed = write(terminal, "\x03", 1) == 1;
    }
  }
  int status = 0;
  waitpid(pid, &status, 0);
  close(terminal);
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGINT) << seen;
  EXPECT_EQ(seen.find("rank 1 has a terminal"), std::string::npos) << seen;
}

TEST(LauncherRecords, AreKeptOnlyIfTheJobFails) {
  for (const int code : {0, 3}) {
    const auto result = RunShell(2,
                                 "touch $TESSERA_RUN_DIR/world-0.rank-$RANK.flight; "
                                 "echo DIR=$TESSERA_RUN_DIR; sleep 0.3; exit " +
                                     std::to_string(code));
    const std::string folder = ValueOf(result.out, "DIR");
    EXPECT_EQ(std::filesystem::exists(folder), code != 0);
    EXPECT_EQ(result.err.find("--explain " + folder) != std::string::npos, code != 0) << result.err;
    std::filesystem::remove_all(folder);
  }
}

TEST(LauncherRecords, CanBeExplained) {
  const TemporaryFolder folder;
  for (const int rank : {0, 2}) {
    const auto record = std::make_unique<flight::Record>();
    record->magic = flight::kMagic;
    record->rank = rank;
    record->size = 3;
    WriteFile(folder / flight::record_name(0, rank),
              {reinterpret_cast<const char*>(record.get()), sizeof(flight::Record)});
  }
  const auto result = Launcher({"--explain", folder.path().string()}).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_CONTAINS(result.out, "rank 0 of 3", "rank 2 of 3");
  const TemporaryFolder empty;
  const auto none = Launcher({"--explain", empty.path().string()}).wait();
  EXPECT_EQ(none.code, 2);
  EXPECT_CONTAINS(none.err, empty.path().string());
}

}  // namespace
}  // namespace tessera::testing
