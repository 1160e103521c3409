#include "supervisor.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "rank_environment.h"
#include "rendezvous.h"
#include "tessera/core/error.h"

namespace tessera::run {
namespace {

using namespace std::chrono_literals;

// A rank's failure to the last rank's end takes at most the sum of the first two and a little.
constexpr auto kSettleTime = 150ms;
constexpr auto kTermTime = 1000ms;
// After Ctrl-C or a signal to the launcher the ranks may take longer to end in order.
constexpr auto kStopTime = 5000ms;

std::string line_prefix(int rank) {
  return "[rank " + std::to_string(rank) + "] ";
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::vector<pid_t> children_of_this_process() {
  std::ifstream file("/proc/self/task/" + std::to_string(getpid()) + "/children");
  std::vector<pid_t> children;
  for (pid_t pid = 0; file >> pid;) {
    children.push_back(pid);
  }
  return children;
}

}  // namespace

Supervisor::Rank::Rank(int number, RankProcess process, OutputSink& out_sink, OutputSink& err_sink)
    : rank(number), pid(process.pid), err(std::move(process.err), line_prefix(number), err_sink) {
  if (process.out) {
    out.emplace(std::move(process.out), line_prefix(number), out_sink);
  }
}

Supervisor::Supervisor(const Options& options)
    : options_(options), out_(STDOUT_FILENO), err_(STDERR_FILENO) {
  // What the ranks started and left behind becomes ours, so that it can be ended as well.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Supervisor::~Supervisor() {
  signal_ranks(SIGKILL);
  end_leftovers();
}

void Supervisor::start() {
  Rendezvous rendezvous = make_rendezvous(options_);
  const std::string token = job_token(options_);
  for (int local = 0; local < options_.nproc; ++local) {
    const int rank = options_.first_rank() + local;
    // Rank 0 has the launcher's standard output, terminal or not, for its progress line.
    RankCommand command{options_.program, rank_environment(options_, rendezvous, token, local),
                        rank == 0 ? rendezvous.listener.get() : -1, rank == 0};
    RankProcess process = start_rank(command, guardian_);
    ranks_.push_back(std::make_unique<Rank>(rank, std::move(process), out_, err_));
  }
}

int Supervisor::run() {
  start();
  while (!all_ended()) {
    wait_for_events();
    take_signals();
    read_outputs();
    reap();
    advance_if_due();
  }
  if (stage_ == Stage::kSettling) {
    report_failure();
  }
  end_leftovers();
  for (auto* relay : relays()) {
    relay->finish();
  }
  deadline_.reset();
  drain();
  if (stop_signal_ != 0) {
    return 128 + stop_signal_;
  }
  return failed_.empty() ? 0 : failed_.front()->status->code();
}

void Supervisor::wait_for_events() {
  std::vector<pollfd> waits{{signals_.fd(), POLLIN, 0}};
  for (const auto* relay : relays()) {
    if (relay->open() && !relay->sink().full()) {
      waits.push_back({relay->fd(), POLLIN, 0});
    }
  }
  for (const auto* sink : {&out_, &err_}) {
    if (sink->pending()) {
      waits.push_back({sink->fd(), POLLOUT, 0});
    }
  }
  poll(waits.data(), waits.size(), poll_timeout());
}

void Supervisor::read_outputs() {
  for (auto* relay : relays()) {
    if (relay->open() && !relay->sink().full()) {
      relay->read_available();
    }
  }
  out_.flush();
  err_.flush();
}

void Supervisor::reap() {
  std::vector<Rank*> ended;
  siginfo_t info{};
  // Looks first: until a rank is waited for, its process group's number is nobody else's.
  while (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
    const pid_t pid = std::exchange(info.si_pid, 0);
    const auto found = std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
      return rank->pid == pid && !rank->status;
    });
    if (found != ranks_.end()) {
      kill(-pid, SIGKILL);  // what the rank started ends with it
      guardian_.forget(pid);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    if (found != ranks_.end()) {
      (*found)->status = ExitStatus(status);
      ended.push_back(found->get());
    }
  }
  note_failures(ended);
}

void Supervisor::note_failures(const std::vector<Rank*>& ended) {
  // From the moment that the ranks are told to end, how they end says nothing.
  if (stage_ == Stage::kTerminating || stage_ == Stage::kKilling) {
    return;
  }
  for (auto* rank : ended) {
    if (!rank->status->ok()) {
      failed_.push_back(rank);
    }
  }
  // Ranks that lose a killed peer exit with an error: the killed one is the cause.
  std::stable_partition(failed_.begin(), failed_.end(),
                        [](const Rank* rank) { return rank->status->by_signal(); });
  if (!failed_.empty() && stage_ == Stage::kRunning) {
    begin(Stage::kSettling);
  }
}

void Supervisor::take_signals() {
  while (const auto signal = signals_.next()) {
    if (is_stop_signal(*signal)) {
      if (stop_signal_ != 0) {
        begin(Stage::kKilling);
        continue;
      }
      stop_signal_ = *signal;
      say("got " + signal_name(*signal) + ", ending the job" +
          (*signal == SIGINT ? " (again to kill it)" : ""));
      signal_ranks(*signal);
      begin(Stage::kTerminating);
    } else if (*signal != SIGCHLD) {
      for (const auto& rank : ranks_) {
        if (!rank->status) {
          kill(rank->pid, *signal);
        }
      }
    }
  }
}

void Supervisor::report_failure() {
  Rank& cause = *failed_.front();
  const auto others =
      std::count_if(ranks_.begin(), ranks_.end(), [](const auto& rank) { return !rank->status; });
  for (auto* rank : failed_) {
    rank->err.finish();
  }
  say("rank " + std::to_string(cause.rank) + " (pid " + std::to_string(cause.pid) +
      (options_.nnodes > 1 ? " on " + host_name() : "") + ") " + cause.status->describe() +
      (others > 0 ? "; ending the other ranks" : ""));
  const auto& lines = cause.err.last_lines();
  err_.add(lines.empty() ? "  it wrote nothing to its standard error\n"
                         : "  the last lines of its standard error:\n");
  for (const auto& line : lines) {
    err_.add("    " + line + "\n");
  }
  for (std::size_t i = 1; i < failed_.size(); ++i) {
    const auto& other = *failed_[i];
    const auto& last = other.err.last_lines();
    say("rank " + std::to_string(other.rank) + " (pid " + std::to_string(other.pid) + ") then " +
        other.status->describe() + (last.empty() ? "" : ": " + last.back()));
  }
}

void Supervisor::begin(Stage stage) {
  if (stage <= stage_) {
    return;
  }
  stage_ = stage;
  const auto now = Clock::now();
  switch (stage) {
    case Stage::kRunning:
      break;
    case Stage::kSettling:
      deadline_ = now + kSettleTime;
      break;
    case Stage::kTerminating:
      deadline_ = now + (stop_signal_ != 0 ? kStopTime : kTermTime);
      break;
    case Stage::kKilling:
      deadline_.reset();
      signal_ranks(SIGKILL);
      break;
  }
}

void Supervisor::advance_if_due() {
  if (!deadline_ || Clock::now() < *deadline_ || all_ended()) {
    return;
  }
  if (stage_ == Stage::kSettling) {
    report_failure();
    signal_ranks(SIGTERM);
    begin(Stage::kTerminating);
  } else if (stage_ == Stage::kTerminating) {
    say("killing the ranks that have not ended");
    begin(Stage::kKilling);
  }
}

void Supervisor::signal_ranks(int signal) {
  for (const auto& rank : ranks_) {
    if (!rank->status) {
      kill(-rank->pid, signal);
    }
  }
}

void Supervisor::end_leftovers() {
  // In rounds, because a killed process' own children become ours.
  for (int round = 0; round < 100; ++round) {
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    bool any = false;
    for (const pid_t pid : children_of_this_process()) {
      if (pid != guardian_.pid()) {
        any = true;
        kill(pid, SIGKILL);
      }
    }
    if (!any) {
      return;
    }
    usleep(10'000);
  }
}

// With the job over, a slow reader may take its time, unless the launcher is told to stop.
void Supervisor::drain() {
  out_.flush();
  err_.flush();
  while (out_.pending() || err_.pending()) {
    wait_for_events();
    out_.flush();
    err_.flush();
    while (const auto signal = signals_.next()) {
      if (is_stop_signal(*signal)) {
        return;
      }
    }
  }
}

bool Supervisor::all_ended() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const auto& rank) { return rank->status.has_value(); });
}

int Supervisor::poll_timeout() const {
  if (!deadline_) {
    return -1;
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now());
  return static_cast<int>(std::max<std::chrono::milliseconds::rep>(left.count(), 0));
}

std::vector<LineRelay*> Supervisor::relays() {
  std::vector<LineRelay*> all;
  for (const auto& rank : ranks_) {
    if (rank->out) {
      all.push_back(&*rank->out);
    }
    all.push_back(&rank->err);
  }
  return all;
}

void Supervisor::say(const std::string& text) {
  err_.add("tessera-run: " + text + "\n");
}

}  // namespace tessera::run
