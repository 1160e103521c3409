#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "meeting.h"
#include "options.h"
#include "peer_launchers.h"
#include "process/guardian.h"
#include "process/output_routes.h"
#include "process/rank_output.h"
#include "process/rank_process.h"
#include "process/signal_queue.h"
#include "run_folder.h"

namespace tessera::run {

/// Starts the ranks of this node, passes their output on, and ends them all when one fails or when
/// the launcher is asked to stop.
class Supervisor {
 public:
  /// `logs` outlives this object. `start`: how often the job was started before. `meeting`: where
  /// the launchers have met.
  Supervisor(const Options& options, const LogFolder& logs, int start, Meeting meeting);
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  /// How a job ended.
  struct Outcome {
    /// The launcher's exit code: 0; kStoppedExitCode where ranks ended with that; the failing
    /// rank's code or 128 + its signal; 128 + the signal that stopped the launcher; or 1 where
    /// output was lost or another node failed.
    int code = 0;
    bool failed = false;  ///< by itself: not because the launcher was told to stop
  };
  /// No process of the job is left when it returns.
  Outcome run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Rank {
    Rank(int number, pid_t process, LineRelay errors)
        : rank(number), pid(process), err(std::move(errors)) {}

    int rank;
    pid_t pid;
    std::optional<LineRelay> out;  // none for a rank that has the launcher's own output
    LineRelay err;
    std::optional<ExitStatus> status;
  };

  // The stages of ending a job. After a failure the other ranks first get a moment to end by
  // themselves (those that fail because a peer is gone report their own error then); then they get
  // SIGTERM, then SIGKILL. A stage ends early when all ranks have ended.
  enum class Stage { kRunning, kSettling, kTerminating, kKilling };

  // Starts the ranks one after another; throws if one cannot be started.
  void start();
  // Sleeps until there is a signal, output to read, room to write, or the deadline has come.
  void wait_for_events();
  void read_outputs();
  // Takes note of every child that has ended: ranks, and processes that they left behind.
  void reap();
  void take_signals();
  // Adds the ranks that have just failed to `failed_`, and begins the end of the job.
  void note_failures(const std::vector<Rank*>& ended);
  // Begins the end of the job where another node has failed.
  void note_failure_elsewhere();
  void report_failure();
  void report_others();
  // Keeps the ranks' records if the job has failed or there are reports.
  void keep_records();
  // Moves to a later stage; a call for an earlier one does nothing.
  void begin(Stage stage);
  void advance_if_due();
  // To the process groups: ranks and what they have started.
  void signal_ranks(int signal);
  // False if the launcher was asked to stop meanwhile.
  bool drain();
  // Says so where lines for the standard output could not be written; returns the exit code.
  int note_lost_output(int code);
  bool all_ended() const {
    return std::ranges::all_of(ranks_, [](const auto& rank) { return rank->status.has_value(); });
  }
  Outcome outcome() const;
  int poll_timeout() const;
  std::vector<LineRelay*> relays();
  std::vector<OutputSink*> sinks();
  void flush() { std::ranges::for_each(sinks(), &OutputSink::flush); }
  void start_rank_of(int local_rank, const RankCommand& command);
  void say(const std::string& text) { err_.add("tessera-run: " + text + "\n"); }

  Options options_;
  FileDescriptor listener_;
  PeerLaunchers peers_;
  RunFolder run_folder_;
  // Children that are not the job's: those from before an exec of the launcher, and the guardian.
  std::set<pid_t> spared_;
  // Made before the signals are blocked and any rank is started: it is a fork of this process.
  Guardian guardian_;
  SignalQueue signals_;
  OutputSink out_;
  OutputSink err_;
  LineMerger errors_;
  OutputRoutes routes_;
  // By pointer: `failed_` points to them, and the relays stay where they are.
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Rank*> failed_;  // the cause first
  std::string failure_elsewhere_;
  Stage stage_ = Stage::kRunning;
  // The end of the stage; none while it lasts until the ranks have ended.
  std::optional<Clock::time_point> deadline_;
  // The first signal that asked the launcher to stop; 0: none.
  int stop_signal_ = 0;
};

}  // namespace tessera::run
