// tessera-run starts the ranks of a job on this machine and ends them together. Its only thread
// waits in poll(), so that a slow output reader does not delay the notice of a rank's end.

#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <utility>

#include "tessera/core/detail/flight_record.h"
#include "tessera/core/error.h"
#include "tessera/core/process.h"

namespace tessera::run {
namespace {
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;
constexpr auto kTermTime = 1000ms;   ///< time between SIGTERM and SIGKILL if a rank has failed
constexpr auto kSignalPoll = 100ms;  ///< time between checks for a handler of a pending signal
constexpr auto kNever = Clock::time_point::max();
constexpr std::size_t kLongestLine = 64 << 10;  ///< maximum bytes of a line; a longer line is split
constexpr std::size_t kFull = 1 << 20;  ///< maximum bytes of output stored for a slow reader
constexpr auto kHelp =
    R"(Usage: tessera-run --nproc N [OPTIONS] [--] PROGRAM ARGS...
       tessera-run --explain DIR
  --nproc N       number of ranks (1)
  --timeout S     seconds until a collective gives up on a rank (TESSERA_TIMEOUT, or 600)
  --watchdog S    seconds until a rank reports a long wait; 0: never (TESSERA_WATCHDOG, or 30)
  --grace S       seconds that ranks get to end after SIGTERM or Ctrl-C, before SIGKILL (5)
  --run-dir DIR   folder of the ranks' flight records (TESSERA_RUN_DIR, or a temporary folder)
  --explain DIR   print what the flight records in DIR say, and run nothing
For several nodes or restarts use torchrun, srun or mpirun: programs read their variables.
)";

void check_errno(bool ok, const std::string& what) {
  TESSERA_CHECK(ok, what, ": ", strerror(errno));
}

/// The output to stdout or stderr of tessera-run. `pending` is text that is not written yet.
struct Sink {
  int fd;
  std::string pending = {};
  int error = 0;

  void flush() {
    for (pollfd ready{fd, POLLOUT, 0}; !pending.empty() && poll(&ready, 1, 0) > 0;) {
      // A ready pipe accepts PIPE_BUF bytes without blocking. `lines`: length of complete lines.
      const std::size_t lines = pending.rfind('\n', PIPE_BUF - 1) + 1;
      const auto written = write(fd, pending.data(),
                                 lines ? lines : std::min<std::size_t>(pending.size(), PIPE_BUF));
      if (written < 0 && errno != EINTR && errno != EAGAIN) {
        error = errno;
        pending.clear();
      }
      pending.erase(0, static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
    }
  }
};

/// A pipe with the output of a rank. Each line gets a prefix and is written to `sink`.
struct Source {
  int fd = -1;
  Sink* sink = nullptr;
  std::string prefix = {};
  std::string line = {};  ///< an incomplete line: the text after the last newline

  void read_available(std::size_t full = kFull) {
    for (char buffer[16 << 10]; fd >= 0 && sink->pending.size() < full;) {
      const auto size = read(fd, buffer, sizeof buffer);
      if (size < 0 && errno == EAGAIN) {
        return;
      }
      if (size <= 0) {
        close(std::exchange(fd, -1));
      }
      for (ssize_t at = 0; at < size; ++at) {
        if (buffer[at] == '\n' || line.size() == kLongestLine) {
          end_line();
        }
        line.append(buffer[at] == '\n' ? 0 : 1, buffer[at]);
      }
    }
  }
  void read_rest() {
    read_available(std::string::npos);
    if (!line.empty()) {
      end_line();
    }
  }
  void end_line() { sink->pending += prefix + std::exchange(line, {}) + "\n"; }
};

struct Rank {
  int number = 0;
  pid_t pid = -1;
  Source out, err;
  std::vector<int> signals = {};   ///< signals to send after the rank has installed a handler
  std::optional<int> status = {};  ///< the rank's exit status from waitpid()

  bool stopped() const { return status && *status == W_EXITCODE(kStoppedExitCode, 0); }
  bool failed() const { return status && *status != 0 && !stopped(); }
  bool killed() const { return WIFSIGNALED(*status); }
  int exit_code() const { return killed() ? 128 + WTERMSIG(*status) : WEXITSTATUS(*status); }
  std::string end() const {
    return !killed() ? detail::concat("exited with code ", WEXITSTATUS(*status))
                     : detail::concat("was killed by SIG", sigabbrev_np(WTERMSIG(*status)), " (",
                                      strsignal(WTERMSIG(*status)), ")");
  }
  /// Whether the rank's process has a handler for the signal. Otherwise SIGUSR1 would kill it.
  bool handles(int signal) const {
    std::ifstream file(detail::concat("/proc/", pid, "/status"));
    std::string line;
    while (std::getline(file, line) && !line.starts_with("SigCgt:")) {
    }
    return line.size() > 7 && (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
  }
};

class Job {
 public:
  Job(int nproc, double grace, char** program)
      : nproc_(nproc),
        grace_(std::llround(grace * 1000)),
        folder_(getenv("TESSERA_RUN_DIR")),
        is_temporary_(folder_.empty()),
        program_(program) {
    if (is_temporary_) {
      const char* tmp = getenv("TMPDIR");
      folder_ = std::string(tmp == nullptr || *tmp == '\0' ? "/tmp" : tmp) + "/tessera-run-XXXXXX";
      check_errno(mkdtemp(folder_.data()) != nullptr, "cannot make " + folder_ + "; use --run-dir");
    }
    fs::create_directories(folder_ = fs::absolute(folder_).string());
  }

  ~Job() {
    signal_ranks(SIGKILL);
    if (std::error_code ignored; is_temporary_) {
      fs::remove_all(folder_, ignored);
    }
  }

  int run() {
    take_over_signals();
    start_ranks();
    while (any_runs()) {
      wait_for_events();
      take_signals();
      for (Rank& rank : ranks_) {
        rank.out.read_available();
        rank.err.read_available();
        reap(rank);
      }
      advance();
      out_.flush();
      err_.flush();
    }
    return finish();
  }

 private:
  void take_over_signals() {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_DFL);  // if SIGCHLD is ignored, the kernel drops exit codes
    sigset_t set;
    sigemptyset(&set);
    for (const int number : {SIGCHLD, SIGUSR1, SIGUSR2, SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
      struct sigaction now {};
      sigaction(number, nullptr, &now);
      if (now.sa_handler != SIG_IGN) {  // ignored signals remain ignored (nohup ignores SIGHUP)
        sigaddset(&set, number);
      }
    }
    sigprocmask(SIG_BLOCK, &set, &mask_before_);
    signals_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  }

  void start_ranks() {
    // Binds the port of rank 0's store, so that no other process can take the port.
    const int store = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {}};
    socklen_t size = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    check_errno(bind(store, any, size) == 0 && listen(store, SOMAXCONN) == 0 &&
                    getsockname(store, any, &size) == 0,
                "cannot listen on 127.0.0.1");
    for (int rank = 0; rank < nproc_; ++rank) {
      int out[2], err[2];
      check_errno(pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0, "cannot make a pipe");
      const pid_t pid = fork();
      check_errno(pid >= 0, "cannot start a process");
      if (pid == 0) {
        become(rank, store, ntohs(address.sin_port), out[1], err[1]);
      }
      setpgid(pid, pid);  // the child calls setpgid() too, because either process can run first
      close(out[1]);
      close(err[1]);
      fcntl(out[0], F_SETFL, O_NONBLOCK);
      fcntl(err[0], F_SETFL, O_NONBLOCK);
      const std::string prefix = detail::concat("[rank ", rank, "] ");
      ranks_.push_back({rank, pid, {out[0], &out_, prefix}, {err[0], &err_, prefix}});
    }
    close(store);
  }
  /// Runs in the child process after fork(). May allocate, because tessera-run has one thread.
  [[noreturn]] void become(int rank, int store, int port, int out, int err) {
    setpgid(0, 0);  // a rank and its child processes form a process group
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const auto set = [](const char* name, const auto& value) {
      setenv(name, detail::concat(value).c_str(), 1);
    };
    set("RANK", rank);
    set("LOCAL_RANK", rank);
    set("WORLD_SIZE", nproc_);
    set("LOCAL_WORLD_SIZE", nproc_);
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", port);
    set("TESSERA_RUN_DIR", folder_);
    set("TESSERA_JOB_TOKEN", getppid());
    cpu_set_t cores;
    const int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    if (const char* threads = getenv("OMP_NUM_THREADS"); threads == nullptr || *threads == '\0') {
      set("OMP_NUM_THREADS", std::max(1, count / nproc_));
    }
    unsetenv("TORCHELASTIC_USE_AGENT_STORE");  // torchrun may have set this variable
    unsetenv("TORCHELASTIC_RESTART_COUNT");
    set("TESSERA_STORE_FD", rank == 0 ? std::to_string(store) : "");
    if (rank == 0) {
      fcntl(store, F_SETFD, 0);
    } else {
      dup2(out, STDOUT_FILENO);
    }
    if (rank != 0 || isatty(STDIN_FILENO)) {  // a background process cannot read a terminal
      dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
    }
    dup2(err, STDERR_FILENO);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
    execvp(program_[0], program_);
    const int code = errno == ENOENT ? 127 : 126;  // 127, as in a shell: the program is missing
    dprintf(STDERR_FILENO, "%s cannot be run: %s%s\n", program_[0], strerror(errno),
            strchr(program_[0], '/') == nullptr ? " in PATH (write ./NAME for one in this folder)"
                                                : "");
    _exit(code);
  }

  void wait_for_events() const {
    // poll() ignores entries with a negative descriptor.
    std::vector<pollfd> waits{{signals_, POLLIN, 0}};
    Clock::time_point next = deadline_;
    for (const Rank& rank : ranks_) {
      waits.push_back({out_.pending.size() < kFull ? rank.out.fd : -1, POLLIN, 0});
      waits.push_back({err_.pending.size() < kFull ? rank.err.fd : -1, POLLIN, 0});
      next = rank.signals.empty() ? next : std::min(next, Clock::now() + kSignalPoll);
    }
    for (const Sink* sink : {&out_, &err_}) {
      waits.push_back({sink->pending.empty() ? -1 : sink->fd, POLLOUT, 0});
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    poll(waits.data(), waits.size(), next == kNever ? -1 : static_cast<int>(std::max(0L, left)));
  }

  void take_signals() {
    for (signalfd_siginfo info{}; read(signals_, &info, sizeof info) == sizeof info;) {
      const auto number = static_cast<int>(info.ssi_signo);
      if (number == SIGUSR1 || number == SIGUSR2) {
        std::ranges::for_each(ranks_, [&](Rank& rank) { rank.signals.push_back(number); });
      } else if (number != SIGCHLD) {
        stop(number);
      }
    }
    for (Rank& rank : ranks_) {
      std::erase_if(rank.signals, [&](int number) {
        return rank.status || (rank.handles(number) && kill(rank.pid, number) == 0);
      });
    }
  }

  void stop(int signal) {
    if (std::exchange(stop_signal_, signal) == 0) {
      say(detail::concat("got SIG", sigabbrev_np(signal), ", ending the job"));
      end_ranks(signal, grace_);
    } else {
      end_ranks(SIGKILL);
    }
  }

  void reap(Rank& rank) {
    int status = 0;
    if (rank.status || waitpid(rank.pid, &status, WNOHANG) <= 0) {
      return;
    }
    rank.status = status;
    kill(-rank.pid, SIGKILL);  // kills the processes that this rank has started
    if (rank.failed() && !is_ending_) {
      failed_.push_back(&rank);
    }
  }

  /// Sends `signal` to all ranks, and SIGKILL to ranks that still run after `time`.
  void end_ranks(int signal, Clock::duration time = {}) {
    signal_ranks(signal);
    is_ending_ = true;
    deadline_ = signal == SIGKILL ? kNever : Clock::now() + time;
  }

  void advance() {
    if (Clock::now() >= deadline_) {
      say("killing the ranks that have not ended");
      end_ranks(SIGKILL);
    } else if (!failed_.empty() && !is_ending_) {
      // Of several failed ranks, a rank that a signal has killed is reported as the cause.
      std::stable_partition(failed_.begin(), failed_.end(),
                            [](const Rank* rank) { return rank->killed(); });
      Rank& cause = *failed_.front();
      cause.err.read_rest();
      say(detail::concat("rank ", cause.number, " (pid ", cause.pid, ") ", cause.end(),
                         any_runs() ? "; ending the other ranks" : ""));
      end_ranks(SIGTERM, kTermTime);
    }
  }

  int finish() {
    std::ranges::for_each(ranks_, [](Rank& rank) { rank.out.read_rest(), rank.err.read_rest(); });
    if (!failed_.empty() && !fs::is_empty(folder_)) {
      is_temporary_ = false;
      say("what the ranks did last: tessera-run --explain " + folder_);
    }
    for (Sink* sink : {&out_, &err_}) {
      for (const int before = stop_signal_; !sink->pending.empty() && stop_signal_ == before;) {
        wait_for_events();
        take_signals();  // a signal such as SIGTERM ends the wait for a slow reader
        sink->flush();
      }
    }
    const bool any_failed = std::ranges::any_of(ranks_, &Rank::failed);
    const bool any_stopped = std::ranges::any_of(ranks_, &Rank::stopped);
    return any_stopped && !any_failed               ? kStoppedExitCode
           : stop_signal_ != 0                      ? 128 + stop_signal_
           : !failed_.empty()                       ? failed_.front()->exit_code()
           : out_.error != 0 && out_.error != EPIPE ? 1  // a write failed: the disk can be full
                                                    : 0;
  }

  void signal_ranks(int signal) const {
    for (const Rank& rank : ranks_) {
      if (!rank.status) {
        kill(-rank.pid, signal);
      }
    }
  }
  bool any_runs() const {
    return std::ranges::any_of(ranks_, [](const Rank& rank) { return !rank.status; });
  }
  void say(const std::string& text) { err_.pending += "tessera-run: " + text + "\n"; }

  const int nproc_;
  const std::chrono::milliseconds grace_;
  std::string folder_;
  bool is_temporary_;
  char** const program_;
  Sink out_{STDOUT_FILENO}, err_{STDERR_FILENO};
  sigset_t mask_before_{};
  int signals_ = -1, stop_signal_ = 0;
  std::deque<Rank> ranks_;  ///< pointers to the elements of a deque stay valid
  std::vector<Rank*> failed_;
  bool is_ending_ = false;
  Clock::time_point deadline_ = kNever;
};

int run(int argc, char** argv) {
  std::map<std::string, std::string> given{{"--nproc", "1"},  {"--grace", "5"},
                                           {"--timeout", ""}, {"--watchdog", ""},
                                           {"--explain", ""}, {"--run-dir", ""}};
  int next = 1;
  for (; next < argc && argv[next][0] == '-' && std::string(argv[next]) != "--"; ++next) {
    const std::string word = argv[next];
    if (word == "--help" || word == "-h") {
      std::cout << kHelp;
      return 0;
    }
    const std::string name = word.substr(0, word.find('='));
    TESSERA_CHECK(given.contains(name), "unknown option ", name, "; see --help, or use torchrun");
    const bool is_next = name.size() == word.size();
    TESSERA_CHECK(!is_next || next + 1 < argc, name, " needs a value");
    given[name] = is_next ? argv[++next] : word.substr(name.size() + 1);
    TESSERA_CHECK(!given[name].empty(), name, " has an empty value");
  }
  if (!given["--explain"].empty()) {
    for (const std::string& line : flight::explain_records(given["--explain"])) {
      std::cout << line << '\n';
    }
    return 0;
  }
  next += next < argc && std::string(argv[next]) == "--" ? 1 : 0;
  TESSERA_CHECK(next < argc && *argv[next] != '\0',
                "no program was given; pass the program: tessera-run --nproc N PROGRAM ARGS...");
  const auto number = [&](const char* name, double least, double most) {
    char* end = nullptr;
    const double value = given[name].empty() ? least : std::strtod(given[name].c_str(), &end);
    TESSERA_CHECK(end == nullptr || (*end == '\0' && value >= least && value <= most), name, " ",
                  given[name], " is not a number from ", least, " to ", most);
    return value;
  };
  number("--timeout", 0.001, 1e6);  // throws for an invalid number
  number("--watchdog", 0, 1e6);
  for (const auto& [name, variable] :
       {std::pair("--timeout", "TESSERA_TIMEOUT"), std::pair("--watchdog", "TESSERA_WATCHDOG"),
        std::pair("--run-dir", "TESSERA_RUN_DIR")}) {
    setenv(variable, given[name].c_str(), given[name].empty() ? 0 : 1);
  }
  const double nproc = number("--nproc", 1, 4096);
  TESSERA_CHECK(nproc == std::floor(nproc), "--nproc ", nproc, " is not a whole number");
  return Job(static_cast<int>(nproc), number("--grace", 0, 1e6), argv + next).run();
}

}  // namespace
}  // namespace tessera::run

int main(int argc, char** argv) {
  // Opens standard streams that the caller has closed; the next pipe would get their numbers.
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) < 0) {
      [[maybe_unused]] const int opened = open("/dev/null", O_RDWR);
    }
  }
  try {
    return tessera::run::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "tessera-run: " << error.what() << '\n';
    return 2;
  }
}
