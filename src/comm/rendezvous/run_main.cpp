// The end of a rank's program after an uncaught exception: a line that says which rank and why.

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

/// "rank 2 of 4: ". Empty for one rank alone, under tessera-run, which shows whose line it is, and
/// where the launcher's variables are wrong.
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
  std::signal(SIGXFSZ, SIG_IGN);  // a limit of file sizes is an error of the write, with its line
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
