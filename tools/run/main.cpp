// tessera-run: starts the ranks of a job on this node and ends them together.
// The exit code is the job's; as in a shell, 127 or 126 if the program cannot be run; 2 if the
// command line is wrong or the launcher itself fails.

#include <exception>
#include <iostream>
#include <string>
#include <utility>

#include "node_numbers.h"
#include "options.h"
#include "process/rank_logs.h"
#include "process/rank_process.h"
#include "rendezvous.h"
#include "supervisor.h"
#include "tessera/core/flight.h"

namespace {

namespace run = tessera::run;

// Each time with new ranks, port and token.
int run_job(run::Options options) {
  run::wait_for_host(options);
  run::NodeNumber node;
  if (!options.is_numbered) {
    node = run::agree_on_number(options);
    options.node_rank = node.node_rank;
  }
  const run::LogFolder logs(options);
  if (!logs.path().empty()) {
    std::cerr << "tessera-run: what the ranks print is written to " << logs.path() << '\n';
  }
  for (int restart = 0;; ++restart) {
    const auto outcome = run::Supervisor(options, logs, restart, std::move(node.listener)).run();
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
