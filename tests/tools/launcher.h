#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

/// The exit and the output of a launcher.
struct Result {
  int code = -1;    ///< exit code, or -1
  int signal = 0;   ///< the signal that killed the launcher itself, or 0
  std::string out;  ///< standard output
  std::string err;  ///< standard error
  std::chrono::duration<double> took{};
};

/// A tessera-run in a separate process. All its descendants have a mark in their environment, by
/// which remaining processes are found.
class Launcher {
 public:
  using Variables = std::map<std::string, std::string>;

  explicit Launcher(const std::vector<std::string>& arguments, const Variables& variables = {});
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  pid_t pid() const { return pid_; }
  /// Waits for the launcher's end and collects its output. After 60 s kills the launcher and fails
  /// the test.
  Result wait();
  /// Closes the reading ends of the launcher's outputs.
  void stop_reading();
  /// Processes of the job that still run after `grace`.
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

/// Runs Shell(ranks, script) to its end.
Result RunShell(int ranks, const std::string& script, const Launcher::Variables& variables = {});

/// Waits until the file exists; it may still be empty. Fails the test after 30 s.
void WaitForFile(const std::string& path);

/// The value of `NAME=value` in a text of such lines, or "(none)".
std::string ValueOf(const std::string& text, const std::string& name);

}  // namespace tessera::testing
