#include "guardian.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <set>

namespace tessera::run {
namespace {

constexpr pid_t kDismissed = 0;

// Holds nothing of the launcher's open: whoever waits for the end of its output must not wait here.
void let_go_of_everything_but(int fd) {
  const int null = open("/dev/null", O_RDWR);
  for (int standard = 0; standard <= 2; ++standard) {
    dup2(null, standard);
  }
  dup2(fd, 3);
  close_range(4, ~0U, 0);
}

[[noreturn]] void guard(int launcher) {
  setsid();
  prctl(PR_SET_NAME, "tessera-guard");
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  let_go_of_everything_but(launcher);
  std::set<pid_t> groups;
  for (;;) {
    pid_t group = kDismissed;
    const auto size = read(3, &group, sizeof group);
    if (size < 0 && errno == EINTR) {
      continue;
    }
    if (size != sizeof group) {
      break;  // the launcher is gone
    }
    if (group == kDismissed) {
      _exit(0);
    }
    if (group > 0) {
      groups.insert(group);
    } else {
      groups.erase(-group);
    }
  }
  for (const pid_t group : groups) {
    kill(-group, SIGKILL);
  }
  _exit(0);
}

}  // namespace

Guardian::Guardian() {
  Pipe pipe = make_pipe();
  pid_ = fork();
  if (pid_ < 0) {
    fail_errno("cannot start a process");
  }
  if (pid_ == 0) {
    pipe.write.close();
    guard(pipe.read.get());
  }
  messages_ = std::move(pipe.write);
}

Guardian::~Guardian() {
  send(kDismissed);
  waitpid(pid_, nullptr, 0);
}

void Guardian::watch(pid_t group) {
  send(group);
}

void Guardian::forget(pid_t group) {
  send(-group);
}

void Guardian::send(pid_t message) {
  // Without its guardian the job runs on as well; SIGPIPE is ignored.
  [[maybe_unused]] const auto written = write(messages_.get(), &message, sizeof message);
}

}  // namespace tessera::run
