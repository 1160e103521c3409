#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

/// What a launcher that ended gave.
struct Result {
  int code = -1;    ///< exit code, or -1
  int signal = 0;   ///< the signal that killed the launcher itself, or 0
  std::string out;  ///< standard output
  std::string err;  ///< standard error
  std::chrono::duration<double> took{};
};

/// A tessera-run as a separate process. Everything below it carries a mark in its environment, so
/// that all remaining processes of the job can be found.
class Launcher {
 public:
  using Variables = std::map<std::string, std::string>;

  explicit Launcher(const std::vector<std::string>& arguments, const Variables& variables = {});
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  pid_t pid() const { return pid_; }
  /// Waits for the launcher's end, collecting what it writes. Kills it and fails the test after 60
  /// s.
  Result wait();
  /// Closes the reading ends of the launcher's outputs.
  void stop_reading();
  /// Processes of the job that still run. `grace`: how long the last of them may take to vanish.
  std::vector<pid_t> left_over(std::chrono::milliseconds grace = std::chrono::seconds(2)) const;

 private:
  std::vector<pid_t> marked() const;

  std::string mark_;
  pid_t pid_ = -1;
  int out_ = -1;
  int err_ = -1;
  std::chrono::steady_clock::time_point start_;
};

/// The job `tessera-run --nproc <ranks> -- sh -c <script>`.
std::vector<std::string> Shell(int ranks, const std::string& script);

/// Runs it to its end.
Result RunShell(int ranks, const std::string& script, const Launcher::Variables& variables = {});

/// Waits until the file exists, which it does before it is written; fails the test after 30 s.
void WaitForFile(const std::string& path);

/// The value of `NAME=value` in a text of such lines, or "(none)".
std::string ValueOf(const std::string& text, const std::string& name);

}  // namespace tessera::testing
