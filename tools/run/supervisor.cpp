// The launcher's loop: one thread that polls the signals, the ranks' pipes and its own outputs, and
// takes the ranks from one stage to the next. Nothing in it blocks but poll(), so that the end of a
// rank is noticed at once, however slowly the output is read.

#include "supervisor.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "process/leftovers.h"
#include "rendezvous.h"
#include "tessera/core/error.h"
#include "tessera/core/flight.h"
#include "tessera/core/process.h"

namespace tessera::run {
namespace {

using namespace std::chrono_literals;

// From a rank's failure to the end of the last rank it takes a little more than the sum of the
// first two at most.
constexpr auto kSettleTime = 150ms;
// For equal lines of several ranks.
constexpr auto kHoldTime = 200ms;
constexpr auto kTermTime = 1000ms;

}  // namespace

Supervisor::Supervisor(const Options& options, const LogFolder& logs, int start, Meeting meeting)
    : options_(options),
      listener_(std::move(meeting.listener)),
      peers_(std::move(meeting.peers)),
      run_folder_(options.run_dir, /*shared=*/options.nnodes > 1),
      spared_(children_of_this_process()),
      guardian_(run_folder_.temporary_path()),
      out_(STDOUT_FILENO),
      err_(STDERR_FILENO),
      errors_(err_, options.nproc == 1 ? 0ms : kHoldTime, options.nproc),
      routes_(options_, logs, start, out_, errors_) {
  // Processes that ranks started and left behind become our children, so that we can end them too.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  spared_.insert(guardian_.pid());
}

Supervisor::~Supervisor() {
  // Also after an exception, such as a program that cannot be run on the third rank: the ranks that
  // were started by then must not stay.
  signal_ranks(SIGKILL);
  end_children_but(spared_);
}

void Supervisor::start() {
  // Closed at the end of this function: from then on rank 0 alone holds the listening socket.
  Rendezvous rendezvous = make_rendezvous(options_, std::move(listener_));
  const std::string token = job_token(options_);
  for (int local = 0; local < options_.nproc; ++local) {
    const int rank = options_.first_rank() + local;
    start_rank_of(local, {options_.program,
                          rank_environment(options_, rendezvous, token, run_folder_.path(), local),
                          rank == 0 ? rendezvous.listener.get() : -1, /*own_stdin=*/rank == 0,
                          routes_.has_own_stdout(local)});
  }
}

void Supervisor::start_rank_of(int local_rank, const RankCommand& command) {
  RankProcess process = start_rank(command, guardian_);
  LineRelay errors(std::move(process.err), err_, routes_.err(local_rank));
  ranks_.push_back(
      std::make_unique<Rank>(options_.first_rank() + local_rank, process.pid, std::move(errors)));
  if (process.out) {
    ranks_.back()->out.emplace(std::move(process.out), out_, routes_.out(local_rank));
  }
}

Supervisor::Outcome Supervisor::run() {
  start();
  while (!all_ended()) {
    wait_for_events();
    take_signals();
    read_outputs();
    reap();
    note_failure_elsewhere();
    advance_if_due();
  }
  // All ranks ended before the settle time was over, so that nothing was reported yet.
  if (stage_ == Stage::kSettling) {
    report_failure();
  }
  // Before the relays are finished: a process that a rank left behind could still write to its
  // pipe.
  end_children_but(spared_);
  std::ranges::for_each(relays(), &LineRelay::finish);
  errors_.release_all();
  flush();
  for (const auto& loss : routes_.losses()) {
    say(loss);
  }
  keep_records();
  // From here on only the reader of the output is waited for.
  deadline_.reset();
  Outcome result = outcome();
  result.failed &= drain();
  result.code = note_lost_output(result.code);
  if (!result.failed) {
    peers_.tell_end();
  }
  return result;
}

Supervisor::Outcome Supervisor::outcome() const {
  const bool any_stopped =
      std::ranges::any_of(ranks_, [](const auto& rank) { return rank->status->stopped(); });
  const bool in_order = std::ranges::all_of(
      ranks_, [](const auto& rank) { return rank->status->ok() || rank->status->stopped(); });
  // Also after a signal to the launcher: the caller should know that the job was saved. Not where
  // the launcher has stopped its ranks for another node, with which it meets again.
  if (any_stopped && in_order && failure_elsewhere_.empty()) {
    return {kStoppedExitCode, false};
  }
  if (stop_signal_ != 0) {
    return {128 + stop_signal_, false};
  }
  if (!failed_.empty()) {
    return {failed_.front()->status->code(), true};
  }
  if (!failure_elsewhere_.empty()) {
    return {EXIT_FAILURE, true};
  }
  return {0, false};
}

void Supervisor::wait_for_events() {
  std::vector<pollfd> waits{{signals_.fd(), POLLIN, 0}};
  for (const auto* relay : relays()) {
    // A relay that will not be read must not be polled either, or poll() would return at once.
    if (relay->open() && !relay->sink().full()) {
      waits.push_back({relay->fd(), POLLIN, 0});
    }
  }
  for (const auto* sink : sinks()) {
    if (sink->pending()) {
      waits.push_back({sink->fd(), POLLOUT, 0});
    }
  }
  peers_.add_waits(waits);
  poll(waits.data(), waits.size(), poll_timeout());
}

void Supervisor::read_outputs() {
  for (auto* relay : relays()) {
    if (relay->open() && !relay->sink().full()) {
      relay->read_available();
    }
  }
  // After a failure all lines wait for the report.
  if (stage_ != Stage::kSettling) {
    errors_.release(Clock::now());
  }
  flush();
}

void Supervisor::reap() {
  std::vector<Rank*> ended;
  siginfo_t info{};
  // WNOWAIT looks only: until a rank is waited for, no other process can get its group's number.
  while (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
    const pid_t pid = std::exchange(info.si_pid, 0);
    // The number of a rank that was reaped may have been given to another child.
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
  // Once the ranks were told to end, how they end tells nothing about the cause.
  if (stage_ == Stage::kTerminating || stage_ == Stage::kKilling) {
    return;
  }
  for (auto* rank : ended) {
    if (!rank->status->ok() && !rank->status->stopped()) {
      failed_.push_back(rank);
    }
  }
  // Ranks that lose a killed peer exit with an error: the killed one is the cause, so it comes
  // first.
  std::stable_partition(failed_.begin(), failed_.end(),
                        [](const Rank* rank) { return rank->status->by_signal(); });
  if (!failed_.empty() && stage_ == Stage::kRunning) {
    begin(Stage::kSettling);
  }
}

// A failure of this node, too, is reported instead, where both are seen at once.
void Supervisor::note_failure_elsewhere() {
  if (const auto failure = peers_.failure(); failure && stage_ == Stage::kRunning) {
    failure_elsewhere_ = *failure;
    begin(Stage::kSettling);
  }
}

void Supervisor::take_signals() {
  while (const auto signal = signals_.next()) {
    if (is_stop_signal(*signal)) {
      // The second one: its sender does not want to wait.
      if (stop_signal_ != 0) {
        begin(Stage::kKilling);
        continue;
      }
      stop_signal_ = *signal;
      if (stage_ == Stage::kSettling) {
        report_failure();  // what follows skips the report at the end of that stage
      }
      say("got " + signal_name(*signal) + ", ending the job" +
          (*signal == SIGINT ? " (again to kill it)" : ""));
      // The same signal, so that a program's own handler sees what was meant.
      signal_ranks(*signal);
      begin(Stage::kTerminating);
    } else if (*signal != SIGCHLD) {
      for (const auto& rank : ranks_) {
        if (!rank->status) {
          // To the rank alone: the default action of SIGUSR1 would end a helper process that it has
          // started.
          kill(rank->pid, *signal);
        }
      }
    }
  }
}

// What the ranks wrote is shown once: that of the cause just above the line that names it.
void Supervisor::report_failure() {
  if (failed_.empty()) {
    errors_.release_all();
    say(failure_elsewhere_ + "; ending the ranks of this node");
    peers_.tell_failure(failure_elsewhere_);
    return;
  }
  Rank& cause = *failed_.front();
  const auto others = std::ranges::count_if(ranks_, [](const auto& rank) { return !rank->status; });
  for (auto* rank : failed_) {
    rank->err.finish();  // its last line may have no newline
  }
  const bool shown_before = !errors_.holds_lines_of(cause.rank);
  errors_.release_all(cause.rank);
  const std::string text =
      "rank " + std::to_string(cause.rank) + " (pid " + std::to_string(cause.pid) +
      (options_.nnodes > 1 ? " on " + host_name() : "") + ") " + cause.status->describe();
  say(text + (others > 0 ? "; ending the other ranks" : ""));
  peers_.tell_failure(text);
  if (!cause.err.last_line()) {
    err_.add("  it wrote nothing to its standard error\n");
  } else if (shown_before) {
    err_.add("  the last line of its standard error: " + *cause.err.last_line() + "\n");
  }
  report_others();
}

void Supervisor::report_others() {
  std::map<std::string, std::vector<int>> ends;
  for (std::size_t i = 1; i < failed_.size(); ++i) {
    ends[failed_[i]->status->describe()].push_back(failed_[i]->rank);
  }
  for (auto& [end, ranks] : ends) {
    std::ranges::sort(ranks);  // they failed in another order
    say(flight::name_ranks(ranks) + " then " + end);
  }
}

void Supervisor::keep_records() {
  const bool failed = !failed_.empty() && run_folder_.has_records();
  if (failed || run_folder_.has_reports()) {
    run_folder_.keep();
    say("what the ranks did last: tessera-run --explain " + run_folder_.path());
  }
}

void Supervisor::begin(Stage stage) {
  // A failure during the termination, or a third Ctrl-C, must not start a stage again.
  if (stage <= stage_) {
    return;
  }
  stage_ = stage;
  const auto now = Clock::now();
  if (stage == Stage::kSettling) {
    deadline_ = now + kSettleTime;
  } else if (stage == Stage::kTerminating) {
    // After a failure there is little that the others could still do.
    deadline_ = now + (stop_signal_ != 0 ? std::chrono::ceil<Clock::duration>(options_.grace)
                                         : Clock::duration(kTermTime));
  } else {
    deadline_.reset();
    signal_ranks(SIGKILL);
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

// Writes the rest of the output. A slow reader may take its time, unless the launcher is asked to
// stop.
bool Supervisor::drain() {
  for (;;) {
    flush();
    while (const auto signal = signals_.next()) {
      if (is_stop_signal(*signal)) {
        return false;
      }
    }
    if (std::ranges::none_of(sinks(), &OutputSink::pending)) {
      return true;
    }
    wait_for_events();
    peers_.failure();  // read, or poll() would return at once; the outcome is known
  }
}

// A reader that has gone wanted no more.
int Supervisor::note_lost_output(int code) {
  if (out_.error() == 0 || out_.error() == EPIPE) {
    return code;
  }
  say("standard output lacks lines of the ranks: " + std::string(std::strerror(out_.error())));
  drain();
  return code == 0 ? EXIT_FAILURE : code;
}

int Supervisor::poll_timeout() const {
  std::optional<Clock::time_point> next = deadline_;
  if (const auto due = errors_.due(); due && stage_ != Stage::kSettling) {
    next = next ? std::min(*next, *due) : *due;
  }
  if (!next) {
    return -1;
  }
  // Rounded up: with 0 for the last fraction of a millisecond the loop would spin.
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
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

std::vector<OutputSink*> Supervisor::sinks() {
  std::vector<OutputSink*> all = routes_.sinks();
  all.insert(all.end(), {&out_, &err_});
  return all;
}

}  // namespace tessera::run
