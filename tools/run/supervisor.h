#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "exit_status.h"
#include "guardian.h"
#include "line_relay.h"
#include "options.h"
#include "output_sink.h"
#include "rank_process.h"
#include "signal_queue.h"

namespace tessera::run {

/// Starts the ranks of this node, passes their output on, and ends them all when one fails or when
/// the launcher is told to stop.
class Supervisor {
 public:
  explicit Supervisor(const Options& options);
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  /// The launcher's exit code: 0, the failing rank's code or 128 + its signal, or 128 + the signal
  /// that stopped the launcher. No process of the job is left when it returns.
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Rank {
    Rank(int number, RankProcess process, OutputSink& out_sink, OutputSink& err_sink);

    int rank;
    pid_t pid;
    std::optional<LineRelay> out;  // none for rank 0, which has the launcher's own output
    LineRelay err;
    std::optional<ExitStatus> status;
  };

  // What happens next unless all ranks end before: a failure lets the others end by themselves for
  // a moment (who breaks because of it should not be asked twice), then they are told, then killed.
  enum class Stage { kRunning, kSettling, kTerminating, kKilling };

  void start();
  void wait_for_events();
  void read_outputs();
  void reap();
  void take_signals();
  void note_failures(const std::vector<Rank*>& ended);
  void report_failure();
  void begin(Stage stage);
  void advance_if_due();
  void signal_ranks(int signal);
  void end_leftovers();
  void drain();
  bool all_ended() const;
  int poll_timeout() const;
  std::vector<LineRelay*> relays();
  void say(const std::string& text);

  Options options_;
  Guardian guardian_;
  SignalQueue signals_;
  OutputSink out_;
  OutputSink err_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Rank*> failed_;  // the cause first
  Stage stage_ = Stage::kRunning;
  std::optional<Clock::time_point> deadline_;
  int stop_signal_ = 0;
};

}  // namespace tessera::run
