// The end of the program of a rank after an uncaught exception: one line that says which rank
// failed and why.

#include "tessera/comm/world.h"

#include <c10/util/Exception.h>

#include <csignal>
#include <exception>
#include <string>

#include "host/host.h"
#include "tessera/core/error.h"
#include "tessera/core/process.h"

namespace tessera::comm {
namespace {

/// The prefix of a message: "rank 2 of 4: ". Empty for a world of one rank, under tessera-run,
/// which shows the rank of each line, and if the variables of the launcher are invalid.
std::string name_of_rank() {
  try {
    const JobVariables job = read_job_variables(&environment_variable);
    const bool is_known = job.size == 1 || environment_variable("TESSERA_JOB_TOKEN");
    return is_known ? "" : tessera::detail::concat("rank ", job.rank, " of ", job.size, ": ");
  } catch (const std::exception&) {
    return "";
  }
}

}  // namespace

int run_main(const std::function<void()>& body) {
  // With SIGXFSZ ignored, writing a file above the size limit is an error with a message and does
  // not end the process.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    body();
    return 0;
  } catch (const c10::Error& error) {
    tessera::end_program(name_of_rank() + "error", error.what_without_backtrace());
  } catch (const std::exception& error) {
    tessera::end_program(name_of_rank() + "error", error.what());
  }
}

}  // namespace tessera::comm
