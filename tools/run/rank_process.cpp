#include "rank_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera::run {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> result;
  for (const auto& word : words) {
    result.push_back(const_cast<char*>(word.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

// What the child needs between fork and exec: nothing there may allocate.
struct Child {
  std::vector<char*> program;
  std::vector<char*> environment;
  int inherited;
  int out;  // or -1
  int err;
  int failure;  // gets errno where the program cannot be run
  pid_t launcher;
  Guardian* guardian;
};

void restore_signals() {
  signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void become(const Child& child) {
  setpgid(0, 0);
  // By the rank itself, before it can start anything: the launcher may be killed at any time.
  child.guardian->watch(getpid());
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != child.launcher) {
    _exit(1);  // the launcher ended before the line above took effect
  }
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  if (child.out >= 0) {
    dup2(child.out, STDOUT_FILENO);
  }
  dup2(child.err, STDERR_FILENO);
  if (null > STDERR_FILENO) {
    close(null);
  }
  if (child.inherited >= 0) {
    fcntl(child.inherited, F_SETFD, 0);
  }
  restore_signals();
  execvpe(child.program[0], child.program.data(), child.environment.data());
  const int error = errno;
  [[maybe_unused]] const auto written = write(child.failure, &error, sizeof error);
  _exit(127);
}

// Nothing arrives where exec closed the other end.
int exec_error(const FileDescriptor& failure) {
  int error = 0;
  ssize_t size = 0;
  do {
    size = read(failure.get(), &error, sizeof error);
  } while (size < 0 && errno == EINTR);
  return size == sizeof error ? error : 0;
}

std::string describe(const std::string& program, int error) {
  if (error == ENOENT) {
    return program + " was not found" +
           (program.find('/') == std::string::npos
                ? " in PATH: write ./" + program + " for a program in this folder"
                : " (or its interpreter was not)");
  }
  return program + " cannot be run: " + std::strerror(error);
}

}  // namespace

CannotExecute::CannotExecute(const std::string& program, int error)
    : message_(describe(program, error)), exit_code_(error == ENOENT ? 127 : 126) {}

RankProcess start_rank(const RankCommand& command, Guardian& guardian) {
  Pipe out = command.own_stdout ? Pipe{} : make_pipe();
  Pipe err = make_pipe();
  Pipe failure = make_pipe();
  const Child child{
      pointers(command.program), pointers(command.environment), command.inherited, out.write.get(),
      err.write.get(),           failure.write.get(),           getpid(),          &guardian};
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
    guardian.forget(pid);
    waitpid(pid, nullptr, 0);
    throw CannotExecute(command.program.front(), error);
  }
  return {pid, std::move(out.read), std::move(err.read)};
}

}  // namespace tessera::run
