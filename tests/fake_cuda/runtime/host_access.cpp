#include "runtime/host_access.h"

#include <unistd.h>

#include <csignal>
#include <cstring>

#include "record/record.h"
#include "runtime/memory.h"

namespace fake_cuda {
namespace {

struct sigaction previous {};

constexpr char kWhat[] = "the host touches memory of a device";

/// Not safe in a signal handler in general: what it locks is not held where the host touches memory
/// of a device, which the fake itself does not.
void on_fault(int signal, siginfo_t* info, void*) {
  // Back at the instruction, the signal comes again, and takes its usual way.
  sigaction(signal, &previous, nullptr);
  if (kind_of(info->si_addr) != MemoryKind::kDevice) {
    return;
  }
  count_violation(kWhat);
  static_cast<void>(write(STDERR_FILENO, "fake CUDA: ", std::strlen("fake CUDA: ")));
  static_cast<void>(write(STDERR_FILENO, kWhat, std::strlen(kWhat)));
  static_cast<void>(write(STDERR_FILENO, "\n", 1));
  write_reports();
}

}  // namespace

void watch_host_access() {
  static const int once = [] {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGSEGV, &action, &previous);
  }();
  static_cast<void>(once);
}

}  // namespace fake_cuda
