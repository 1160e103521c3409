#include "signal_queue.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <array>

namespace tessera::run {
namespace {

constexpr std::array kStopSignals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
// The end of a child, and the two that are passed on to the ranks.
constexpr std::array kOtherSignals = {SIGCHLD, SIGUSR1, SIGUSR2};

// nohup and a shell's background jobs rely on what they ignore staying ignored.
bool is_ignored(int signal) {
  struct sigaction action {};
  sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

}  // namespace

SignalQueue::SignalQueue() {
  // A reader of the launcher's output may go away, and so may the guardian: the write then fails,
  // and the job goes on without it.
  signal(SIGPIPE, SIG_IGN);
  // A parent that ignored SIGCHLD has handed that on; the kernel would then reap the ranks itself,
  // and their exit codes would be lost.
  signal(SIGCHLD, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kOtherSignals) {
    sigaddset(&set, signal);
  }
  for (const int signal : kStopSignals) {
    if (!is_ignored(signal)) {
      sigaddset(&set, signal);
    }
  }
  sigprocmask(SIG_BLOCK, &set, &before_);
  descriptor_ = FileDescriptor(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!descriptor_) {
    fail_errno("cannot wait for signals");
  }
}

// What has come since the last look, for ranks that have ended by now, must not end the launcher.
SignalQueue::~SignalQueue() {
  for (const int signal : kOtherSignals) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    ::signal(signal, SIG_IGN);
    sigaction(signal, &action, nullptr);
  }
  sigprocmask(SIG_SETMASK, &before_, nullptr);
}

std::optional<int> SignalQueue::next() {
  signalfd_siginfo info{};
  if (read(descriptor_.get(), &info, sizeof info) != sizeof info) {
    return std::nullopt;
  }
  return static_cast<int>(info.ssi_signo);
}

bool is_stop_signal(int signal) {
  for (const int stop : kStopSignals) {
    if (signal == stop) {
      return true;
    }
  }
  return false;
}

}  // namespace tessera::run
