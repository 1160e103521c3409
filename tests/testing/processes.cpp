#include "testing/processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>

#include "tessera/core/error.h"

extern char** environ;

namespace tessera::testing {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{5};

struct Child {
  pid_t pid = -1;
  int output = -1;
  bool running = true;
  bool stopped = false;
  Ended ended;
};

std::vector<std::string> environment_of(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string variable = *entry;
    if (!changes.contains(variable.substr(0, variable.find('=')))) {
      result.push_back(variable);
    }
  }
  for (const auto& [name, value] : changes) {
    result.push_back(name + "=" + value);
  }
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) {
    result.push_back(text.data());
  }
  result.push_back(nullptr);
  return result;
}

Child start(const std::string& body, const std::map<std::string, std::string>& variables) {
  int ends[2];
  TESSERA_CHECK(pipe2(ends, O_CLOEXEC) == 0, "pipe: ", std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  std::vector<std::string> arguments = {"test", "--gtest_filter=" + body,
                                        "--gtest_also_run_disabled_tests"};
  std::vector<std::string> environment = environment_of(variables);
  Child child;
  const int error = posix_spawn(&child.pid, "/proc/self/exe", &actions, nullptr,
                                pointers(arguments).data(), pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  TESSERA_CHECK(error == 0, "posix_spawn: ", std::strerror(error));
  child.output = ends[0];
  fcntl(child.output, F_SETFL, O_NONBLOCK);
  return child;
}

void read_output(Child& child) {
  char buffer[4096];
  ssize_t length = 0;
  while ((length = read(child.output, buffer, sizeof(buffer))) > 0) {
    child.ended.output.append(buffer, static_cast<std::size_t>(length));
  }
}

void reap(Child& child, steady_clock::time_point started) {
  int status = 0;
  read_output(child);
  if (!child.running || waitpid(child.pid, &status, WNOHANG | WUNTRACED) != child.pid) {
    return;
  }
  if (WIFSTOPPED(status)) {
    child.stopped = true;
    return;
  }
  read_output(child);
  close(child.output);
  child.running = false;
  child.ended.at = steady_clock::now();
  child.ended.after =
      std::chrono::duration_cast<std::chrono::milliseconds>(child.ended.at - started);
  child.ended.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  child.ended.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

void wait_for(std::vector<Child>& children, std::chrono::seconds deadline) {
  const auto started = steady_clock::now();
  bool killed = false;
  for (std::size_t running = children.size(); running > 0;) {
    running = 0;
    std::size_t stopped = 0;
    for (Child& child : children) {
      if (child.running) {
        reap(child, started);
        running += child.running ? 1 : 0;
        stopped += child.running && child.stopped ? 1 : 0;
      }
    }
    const bool none_goes_on = running > 0 && stopped == running;
    if (!killed && (none_goes_on || steady_clock::now() - started > deadline)) {
      killed = true;
      for (const Child& child : children) {
        if (child.running) {
          kill(child.pid, SIGKILL);
        }
      }
    }
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace

// Draws ports below 30000, because the kernel gives connections of other tests higher ports.
int free_port() {
  std::random_device random;
  std::uniform_int_distribution<int> ports(10000, 29999);
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int port = ports(random);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    if (bound) {
      return port;
    }
  }
  TESSERA_CHECK(false, "no free port: ", std::strerror(errno));
  return 0;
}

std::vector<Ended> RunProcesses(int size, const std::string& body,
                                const ProcessesOptions& options) {
  std::map<std::string, std::string> variables = {
      {"WORLD_SIZE", std::to_string(size)},
      {"LOCAL_WORLD_SIZE", std::to_string(size)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(free_port())},
      {"OMP_NUM_THREADS", "1"},
  };
  for (const auto& [name, value] : options.environment) {
    variables[name] = value;
  }
  std::vector<Child> children;
  for (int rank = 0; rank < size; ++rank) {
    variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
    children.push_back(start(body, variables));
  }
  wait_for(children, options.deadline);
  std::vector<Ended> result;
  for (Child& child : children) {
    result.push_back(std::move(child.ended));
  }
  return result;
}

}  // namespace tessera::testing
