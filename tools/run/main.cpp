// tessera-run: starts the ranks of a job on this node and ends them together.
// The exit code is the job's; as in a shell, 127 or 126 if the program cannot be run; 2 if the
// command line is wrong or the launcher itself fails.

#include <exception>
#include <iostream>
#include <string>
#include <utility>

#include "meeting.h"
#include "options.h"
#include "process/file_descriptor.h"
#include "process/rank_logs.h"
#include "process/rank_process.h"
#include "rendezvous.h"
#include "supervisor.h"
#include "tessera/core/flight.h"

namespace {

namespace run = tessera::run;

// As the launchers agree on it, where they do.
run::Meeting take_part(run::Options& options, int restart) {
  run::Meeting meeting = run::meet(options, restart);
  if (meeting.nnodes < options.nnodes && meeting.node_rank == 0) {
    std::cerr << "tessera-run: starting with " << meeting.nnodes << " of " << options.nnodes
              << " nodes\n";
  }
  options.nnodes = meeting.nnodes;
  options.node_rank = meeting.node_rank;
  options.round = meeting.round;
  return meeting;
}

// Each time with new ranks, port and token.
int run_job(const run::Options& options) {
  run::wait_for_host(options);
  const run::LogFolder logs(options);
  if (!logs.path().empty()) {
    std::cerr << "tessera-run: what the ranks print is written to " << logs.path() << '\n';
  }
  for (int restart = 0;; ++restart) {
    run::Options start = options;
    run::Meeting meeting;
    if (run::meets(options)) {
      meeting = take_part(start, restart);
    }
    const auto outcome = run::Supervisor(start, logs, restart, std::move(meeting)).run();
    if (!outcome.failed || options.restarts == 0) {
      return outcome.code;
    }
    if (restart == options.restarts) {
      std::cerr << "tessera-run: no restart of " << options.restarts << " is left\n";
      return outcome.code;
    }
    std::cerr << "tessera-run: starting the job again (restart " << restart + 1 << " of "
              << options.restarts << ")\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  run::fill_standard_streams();
  try {
    // Nothing after --help, which has been printed.
    const auto options = run::parse_options(argc, argv);
    if (options && !options->explain.empty()) {
      for (const std::string& line : tessera::flight::explain_records(options->explain)) {
        std::cout << line << '\n';
      }
      return 0;
    }
    return options ? run_job(*options) : 0;
  } catch (const run::CannotExecute& error) {
    std::cerr << "tessera-run: " << error.what() << '\n';
    return error.exit_code();
  } catch (const std::exception& error) {
    std::cerr << "tessera-run: " << error.what() << '\n';
    return 2;
  }
}
