// fork and exec of one rank. In between, the child is a copy of the launcher that must only make
// system calls; all that it needs is prepared before the fork. Errors of exec travel back through a
// pipe, so that the launcher reports them itself, before it starts further ranks.

#include "rank_process.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/core/process.h"

namespace tessera::run {
namespace {

// As execvpe() takes them. `words` must outlive the result. The cast is safe: exec does not write.
std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> result;
  for (const auto& word : words) {
    result.push_back(const_cast<char*>(word.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

// What the child needs between fork and exec, made before the fork: nothing may allocate in
// between.
struct Child {
  std::vector<char*> program;
  std::vector<char*> environment;
  int inherited;
  bool own_stdin;
  int out;  // or -1
  int err;
  int failure;  // gets errno where the program cannot be run
  pid_t launcher;
  Guardian* guardian;
};

// The launcher ignores SIGPIPE and blocks the signals that it reads from a descriptor
// (SignalQueue). Both would outlast the exec.
void restore_signals() {
  signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

// Whether a rank can have the launcher's standard input: a pipe or a file. A rank is in a separate
// process group and cannot read from a terminal.
bool has_input() {
  return isatty(STDIN_FILENO) == 0;
}

// The child up to its exec. Standard input is empty, because several ranks cannot share one, but
// for the rank that has the launcher's.
[[noreturn]] void become(const Child& child) {
  // A separate process group, so that a signal reaches the rank together with what it has started.
  setpgid(0, 0);
  // The rank itself registers with the guardian, before it can start anything: the launcher may be
  // killed at any time.
  child.guardian->watch(getpid());
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != child.launcher) {
    _exit(1);  // the launcher ended before the line above took effect
  }
  const int null = open("/dev/null", O_RDONLY);
  if (!child.own_stdin || !has_input()) {
    dup2(null, STDIN_FILENO);
  }
  if (child.out >= 0) {
    dup2(child.out, STDOUT_FILENO);
  }
  dup2(child.err, STDERR_FILENO);
  close(null);  // the launcher has all three, so it is none of them
  if (child.inherited >= 0) {
    // Every descriptor of the launcher closes on exec but this one: the store's socket, for rank 0.
    fcntl(child.inherited, F_SETFD, 0);
  }
  restore_signals();
  execvpe(child.program[0], child.program.data(), child.environment.data());
  const int error = errno;
  [[maybe_unused]] const auto written = write(child.failure, &error, sizeof error);
  // Not exit(), which would write the launcher's buffers a second time.
  _exit(127);
}

// 0 if exec succeeded: it closes the other end, and nothing arrives.
int exec_error(const FileDescriptor& failure) {
  int error = 0;
  ssize_t size = 0;
  do {
    size = read(failure.get(), &error, sizeof error);
  } while (size < 0 && errno == EINTR);
  return size == sizeof error ? error : 0;
}

// torchrun would start such a script by Python.
bool is_python(const std::string& program) {
  return program.ends_with(".py");
}

std::string started(const std::string& program) {
  return (is_python(program) ? "python3 " : "./") + program;
}

// exec gives ENOENT also for a script whose interpreter is missing.
std::string describe(const std::string& program, int error) {
  if (error == ENOENT) {
    return program + " was not found" +
           (program.find('/') == std::string::npos
                ? " in PATH: write " + started(program) + " for a program in this folder"
                : " (or its interpreter was not)");
  }
  return program + " cannot be run: " + std::strerror(error) +
         (is_python(program) ? ": write " + started(program) : "");
}

}  // namespace

bool ExitStatus::stopped() const {
  return WIFEXITED(status_) && WEXITSTATUS(status_) == kStoppedExitCode;
}

bool ExitStatus::by_signal() const {
  return WIFSIGNALED(status_);
}

int ExitStatus::code() const {
  return by_signal() ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_);
}

// The text of a signal is the system's, as a shell shows it.
std::string ExitStatus::describe() const {
  if (!by_signal()) {
    return "exited with code " + std::to_string(code());
  }
  const int signal = WTERMSIG(status_);
  return "was killed by " + signal_name(signal) + " (" + strsignal(signal) + ")";
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name : "signal " + std::to_string(signal);
}

CannotExecute::CannotExecute(const std::string& program, int error)
    : message_(describe(program, error)), exit_code_(error == ENOENT ? 127 : 126) {}

// The write ends of the pipes close when this returns: the read ends come to their end once the
// rank, and all that it started, are gone.
RankProcess start_rank(const RankCommand& command, Guardian& guardian) {
  Pipe out = command.own_stdout ? Pipe{} : make_pipe();
  Pipe err = make_pipe();
  Pipe failure = make_pipe();
  const Child child{pointers(command.program),
                    pointers(command.environment),
                    command.inherited,
                    command.own_stdin,
                    out.write.get(),
                    err.write.get(),
                    failure.write.get(),
                    getpid(),
                    &guardian};
  const pid_t pid = fork();
  if (pid < 0) {
    fail_errno("cannot start a process");
  }
  if (pid == 0) {
    become(child);
  }
  setpgid(pid, pid);  // as the child does: whichever comes first
  failure.write.close();
  if (const int error = exec_error(failure.read); error != 0) {
    // Before waitpid(), after which the number may be given to another process.
    guardian.forget(pid);
    waitpid(pid, nullptr, 0);
    throw CannotExecute(command.program.front(), error);
  }
  return {pid, std::move(out.read), std::move(err.read)};
}

}  // namespace tessera::run
