#include "watch/thread_stacks.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>

namespace tessera::comm {
namespace {

constexpr std::chrono::milliseconds kSignalTime{200};

/// What a signal handler fills in: lock-free, and never freed.
struct StackCapture {
  std::atomic<pid_t> wanted{0};  ///< the thread that is asked; 0: none, or it has answered
  int depth = 0;
  std::array<void*, 64> frames{};
};
StackCapture capture;

pid_t calling_thread() {
  return static_cast<pid_t>(syscall(SYS_gettid));
}

void answer(int) {
  const int error = errno;
  if (capture.wanted.load() == calling_thread()) {  // else it comes too late
    capture.depth = backtrace(capture.frames.data(), static_cast<int>(capture.frames.size()));
    capture.wanted.store(0);
  }
  errno = error;
}

/// A signal that the program does not use; 0: there is none. The handler stays: a signal that is
/// still pending would end the process otherwise.
int find_signal() {
  for (int signal = SIGRTMAX - 1; signal > SIGRTMIN; --signal) {
    struct sigaction known {};
    if (sigaction(signal, nullptr, &known) != 0 || known.sa_handler != SIG_DFL) {
      continue;
    }
    struct sigaction action {};
    action.sa_handler = answer;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    sigfillset(&action.sa_mask);
    sigaction(signal, &action, nullptr);
    void* first = nullptr;
    backtrace(&first, 1);  // Its first call loads a library, which a handler must not do.
    return signal;
  }
  return 0;
}

bool capture_stack(pid_t thread, int signal) {
  capture.wanted.store(thread);
  if (syscall(SYS_tgkill, getpid(), thread, signal) != 0) {
    return false;
  }
  const auto deadline = std::chrono::steady_clock::now() + kSignalTime;
  while (capture.wanted.load() != 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      pid_t still = thread;
      return !capture.wanted.compare_exchange_strong(still, 0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

std::string frame_text(void* address) {
  Dl_info info{};
  std::ostringstream text;
  if (dladdr(address, &info) == 0) {
    text << address;
    return text.str();
  }
  const auto offset = [&](void* base) {
    return static_cast<char*>(address) - static_cast<char*>(base);
  };
  if (info.dli_sname != nullptr) {
    const std::unique_ptr<char, decltype(&std::free)> name(
        abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, nullptr), &std::free);
    text << (name == nullptr ? info.dli_sname : name.get()) << " in ";
  }
  text << std::filesystem::path(info.dli_fname).filename().string() << "+0x" << std::hex
       << offset(info.dli_fbase);
  return text.str();
}

std::string name_of_thread(const std::filesystem::path& folder) {
  std::string name;
  std::getline(std::ifstream(folder / "comm"), name);
  return name;
}

}  // namespace

std::string stacks_of_other_threads() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  static const int signal = find_signal();
  constexpr int kOwnFrames = 2;  // the handler and what the kernel calls it through
  std::ostringstream text;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    const pid_t thread = std::atoi(entry.path().filename().c_str());
    if (thread == calling_thread() || signal == 0) {
      continue;
    }
    text << "thread " << thread << " (" << name_of_thread(entry.path()) << ")\n";
    if (!capture_stack(thread, signal)) {
      text << "  it did not answer\n";
      continue;
    }
    for (int i = kOwnFrames; i < capture.depth; ++i) {
      text << "  #" << i - kOwnFrames << " "
           << frame_text(capture.frames[static_cast<std::size_t>(i)]) << '\n';
    }
  }
  return text.str();
}

}  // namespace tessera::comm
