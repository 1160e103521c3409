// The process that ends a job whose launcher was killed. It reads the numbers of process groups
// from a pipe; the end of the pipe without a dismissal means that the launcher is gone. It is
// forked without an exec, so that tessera-run stays one program.

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

// A message is a process group: positive to watch it, negative to forget it, 0 when the launcher
// ends in good order. Ranks write to the pipe as well; a message is far below PIPE_BUF, so messages
// of several writers never mix.
constexpr pid_t kDismissed = 0;

// Closes everything inherited from the launcher but `fd`, which becomes 3: a reader that waits for
// the end of the launcher's output must not have to wait for the guardian.
void close_all_but(int fd) {
  dup2(fd, 3);
  const int null = open("/dev/null", O_RDWR);
  for (int standard = 0; standard <= 2; ++standard) {
    dup2(null, standard);
  }
  close_range(4, ~0U, 0);
}

// The guardian's whole life. In a separate session and with all signals blocked, it is not ended
// by what ends the launcher: Ctrl-C, a closed terminal, a signal to the launcher's process group.
[[noreturn]] void guard(int launcher, const char* folder) {
  setsid();
  prctl(PR_SET_NAME, "tessera-guard");
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  close_all_but(launcher);
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
  // The kernel kills the ranks themselves (PR_SET_PDEATHSIG); this reaches what they have started.
  for (const pid_t group : groups) {
    kill(-group, SIGKILL);
  }
  rmdir(folder);
  _exit(0);
}

}  // namespace

Guardian::Guardian(const std::string& folder) {
  Pipe pipe = make_pipe();
  pid_ = fork();
  if (pid_ < 0) {
    fail_errno("cannot start a process");
  }
  if (pid_ == 0) {
    pipe.write.close();
    guard(pipe.read.get(), folder.c_str());
  }
  // `pipe` closes the read end here, in the launcher.
  messages_ = std::move(pipe.write);
}

Guardian::~Guardian() {
  send(kDismissed);
  // Waits, so that no process of the job is left when the launcher returns.
  waitpid(pid_, nullptr, 0);
}

void Guardian::watch(pid_t group) {
  send(group);
}

void Guardian::forget(pid_t group) {
  send(-group);
}

void Guardian::send(pid_t message) {
  // A failure is ignored, and SIGPIPE too: the job runs on without its guardian.
  [[maybe_unused]] const auto written = write(messages_.get(), &message, sizeof message);
}

}  // namespace tessera::run
