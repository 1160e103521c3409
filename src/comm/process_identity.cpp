#include "process_identity.h"

#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace tessera::comm {
namespace {

struct ProcessStatus {
  char state = 'X';
  std::uint64_t start_time = 0;
};

/// From /proc/PID/stat, where the state is field 3 and the start time field 22 (man 5 proc).
std::optional<ProcessStatus> status_of(std::int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) {
    return std::nullopt;
  }
  // The second field, the program's name in brackets, may hold anything.
  std::istringstream rest(line.substr(line.rfind(')') + 1));
  ProcessStatus status;
  rest >> status.state;
  std::string skipped;
  constexpr int kFieldsBetween = 18;
  for (int i = 0; i < kFieldsBetween; ++i) {
    rest >> skipped;
  }
  rest >> status.start_time;
  return status;
}

}  // namespace

ProcessIdentity this_process() {
  const std::int64_t pid = getpid();
  const auto status = status_of(pid);
  return {pid, status ? status->start_time : 0};
}

bool is_alive(const ProcessIdentity& process) {
  const auto status = status_of(process.pid);
  return status && status->start_time == process.start_time && status->state != 'Z' &&
         status->state != 'X';
}

}  // namespace tessera::comm
