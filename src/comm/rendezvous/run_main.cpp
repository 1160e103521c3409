// How a rank's program ends that does not catch: by a line that says which rank and why.

#include "tessera/comm/run_main.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "rendezvous/job_variables.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// "rank 2 of 4: "; nothing of one rank alone, under tessera-run, which shows whose line it is, and
/// of a launcher's variables that are wrong.
std::string name_of_rank() {
  try {
    const JobVariables job = read_job_variables(&environment_variable);
    const bool is_known = job.size == 1 || environment_variable("TESSERA_JOB_TOKEN");
    return is_known ? "" : tessera::detail::concat("rank ", job.rank, " of ", job.size, ": ");
  } catch (const std::exception&) {
    return "";
  }
}

[[noreturn]] void end(std::string message) {
  std::ranges::replace(message, '\n', ' ');
  std::cout << std::flush;
  std::cerr << name_of_rank() + "error: " + message + "\n" << std::flush;
  std::_Exit(1);
}

}  // namespace

int run_main(const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const c10::Error& error) {
    end(error.what_without_backtrace());
  } catch (const std::exception& error) {
    end(error.what());
  }
}

}  // namespace tessera::comm
