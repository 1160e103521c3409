#include "launcher.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kLongestRun = 60s;

[[noreturn]] void become_launcher(const std::vector<std::string>& arguments,
                                  const Launcher::Variables& variables) {
  for (const auto& [name, value] : variables) {
    setenv(name.c_str(), value.c_str(), 1);
  }
  std::vector<char*> words{const_cast<char*>(TESSERA_RUN)};
  for (const auto& argument : arguments) {
    words.push_back(const_cast<char*>(argument.c_str()));
  }
  words.push_back(nullptr);
  execv(TESSERA_RUN, words.data());
  _exit(99);
}

// Appends the available bytes; false at the end of the file.
bool read_into(int fd, std::string& text) {
  std::array<char, 4096> buffer;
  const auto size = read(fd, buffer.data(), buffer.size());
  if (size > 0) {
    text.append(buffer.data(), static_cast<std::size_t>(size));
  }
  return size > 0;
}

/// A file of a process in /proc; "" if the process has ended, also while the file is read.
std::string file_of_process(const std::string& process, const char* name) {
  std::ostringstream text;
  text << std::ifstream("/proc/" + process + "/" + name, std::ios::binary).rdbuf();
  return text.str();
}

bool is_zombie(const std::string& process) {
  const auto status = file_of_process(process, "stat");
  const auto paren = status.rfind(')');
  return paren == std::string::npos || status.compare(paren, 3, ") Z") == 0;
}

}  // namespace

Launcher::Launcher(const std::vector<std::string>& arguments, const Variables& variables)
    : start_(Clock::now()) {
  static int count = 0;
  mark_ = "TESSERA_TEST_MARK=" + std::to_string(getpid()) + "." + std::to_string(++count) + ".";
  auto all = variables;
  all["TESSERA_TEST_MARK"] = mark_.substr(mark_.find('=') + 1);
  int out[2];
  int err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) {
    throw std::runtime_error("cannot make a pipe");
  }
  pid_ = fork();
  if (pid_ == 0) {
    dup2(out[1], STDOUT_FILENO);
    dup2(err[1], STDERR_FILENO);
    become_launcher(arguments, all);
  }
  close(out[1]);
  close(err[1]);
  out_ = out[0];
  err_ = err[0];
}

Launcher::~Launcher() {
  stop_reading();
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (const pid_t pid : marked()) {
    kill(pid, SIGKILL);
  }
}

Result Launcher::wait() {
  Result result;
  bool reading = out_ >= 0;
  while (reading && Clock::now() - start_ < kLongestRun) {
    std::array<pollfd, 2> ready{pollfd{out_, POLLIN, 0}, pollfd{err_, POLLIN, 0}};
    poll(ready.data(), ready.size(), 1000);
    if (ready[0].revents != 0 && !read_into(out_, result.out)) {
      close(std::exchange(out_, -1));
    }
    if (ready[1].revents != 0 && !read_into(err_, result.err)) {
      close(std::exchange(err_, -1));
    }
    reading = out_ >= 0 || err_ >= 0;
  }
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (Clock::now() - start_ > kLongestRun) {
      ADD_FAILURE() << "tessera-run did not end";
      kill(pid_, SIGKILL);
    }
    std::this_thread::sleep_for(5ms);
  }
  pid_ = -1;
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  result.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  result.took = Clock::now() - start_;
  return result;
}

void Launcher::stop_reading() {
  for (int* fd : {&out_, &err_}) {
    if (*fd >= 0) {
      close(std::exchange(*fd, -1));
    }
  }
}

std::vector<pid_t> Launcher::left_over(std::chrono::milliseconds grace) const {
  const auto end = Clock::now() + grace;
  auto pids = marked();
  while (!pids.empty() && Clock::now() < end) {
    std::this_thread::sleep_for(10ms);
    pids = marked();
  }
  return pids;
}

std::vector<pid_t> Launcher::marked() const {
  std::vector<pid_t> pids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const auto name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos || is_zombie(name)) {
      continue;
    }
    if (file_of_process(name, "environ").find(mark_) != std::string::npos) {
      pids.push_back(std::stoi(name));
    }
  }
  return pids;
}

std::vector<std::string> Shell(int ranks, const std::string& script) {
  return {"--nproc", std::to_string(ranks), "--", "sh", "-c", script};
}

Result RunShell(int ranks, const std::string& script, const Launcher::Variables& variables) {
  return Launcher(Shell(ranks, script), variables).wait();
}

void WaitForFile(const std::string& path) {
  const auto end = Clock::now() + 30s;
  while (!std::filesystem::exists(path)) {
    ASSERT_LT(Clock::now(), end) << path << " never came";
    std::this_thread::sleep_for(5ms);
  }
}

std::string ValueOf(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, name.size() + 1, name + "=") == 0) {
      return line.substr(name.size() + 1);
    }
  }
  return "(none)";
}

}  // namespace tessera::testing
