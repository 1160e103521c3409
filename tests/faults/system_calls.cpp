#include "faults/system_calls.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <thread>

#include "faults/changes.h"

namespace tessera::testing {
namespace {

// System calls may come before main(), so this file must not allocate memory or have constructors.
constexpr std::array kCalls = {"openat", "pwrite", "fsync", "fallocate", "rename",
                               "unlink", "pread",  "close", "link"};

struct Action {
  const char* name;
  int error;  ///< `error`: errno of the failed call, or 0
};
constexpr std::array kActions = {
    Action{"kill", 0},        Action{"short", 0},     Action{"zero", 0},        Action{"slow", 0},
    Action{"stall", 0},       Action{"EINTR", EINTR}, Action{"ENOSPC", ENOSPC}, Action{"EIO", EIO},
    Action{"EDQUOT", EDQUOT}, Action{"EPERM", EPERM}};

struct State {
  std::mutex mutex;
  std::array<char, PATH_MAX> under{};  ///< only calls on files below this folder count; "": none
  std::array<int, kCalls.size()> counts{};
  std::string_view call;
  int at = 0;
  const Action* action = nullptr;
};

State& state() {
  static auto* const made = new State;
  return *made;
}

[[noreturn]] void refuse(const char* what) {
  std::fprintf(stderr, "TESSERA_FAULT=CALL:K:ACTION: %s\n", what);
  std::_Exit(2);
}

void set_fault(const char* under, const char* text) {
  static std::array<char, 64> copy;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.counts.fill(0);
  s.action = nullptr;
  std::snprintf(s.under.data(), s.under.size(), "%s", under);
  if (*text == '\0') {
    return;
  }
  std::snprintf(copy.data(), copy.size(), "%s", text);
  char* rest = nullptr;
  const char* call = strtok_r(copy.data(), ":", &rest);
  const char* at = strtok_r(nullptr, ":", &rest);
  const char* name = strtok_r(nullptr, ":", &rest);
  if (call == nullptr || at == nullptr || name == nullptr) {
    refuse("three parts are needed");
  }
  s.call = call;
  s.at = std::atoi(at);
  for (const Action& action : kActions) {
    if (std::strcmp(action.name, name) == 0) {
      s.action = &action;
    }
  }
  if (s.action == nullptr) {
    refuse("no such action");
  }
}

bool is_under(const State& s, const char* path) {
  const std::size_t length = std::strlen(s.under.data());
  return length > 0 && std::strncmp(path, s.under.data(), length) == 0;
}

bool is(const Action& action, const char* name) {
  return std::strcmp(action.name, name) == 0;
}

/// Counts the call of kCalls[number] on the file `path`. Returns the call's fault, or nullptr.
const Action* fault_at(std::size_t number, const char* path) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (!is_under(s, path)) {
    return nullptr;
  }
  ++s.counts[number];
  int all = 0;
  for (const int count : s.counts) {
    all += count;
  }
  const int count = s.call == "any" ? all : s.call == kCalls[number] ? s.counts[number] : 0;
  const bool lasts = s.action != nullptr && is(*s.action, "slow");
  return count == s.at || (lasts && count > s.at) ? s.action : nullptr;
}

const Action* fault_at(std::size_t number, int fd) {
  if (state().under[0] == '\0') {
    return nullptr;
  }
  std::array<char, PATH_MAX> path{};
  return path_of(fd, path) ? fault_at(number, path.data()) : nullptr;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

/// Makes a system call with the fault `action`, which can reduce `count`, the number of bytes.
template <class Call>
auto act(const Action* action, std::size_t& count, const Call& call) -> decltype(call()) {
  if (action != nullptr && is(*action, "kill")) {
    raise(SIGKILL);
  }
  if (action != nullptr && (is(*action, "slow") || is(*action, "stall"))) {
    std::this_thread::sleep_for(std::chrono::milliseconds(is(*action, "slow") ? 200 : 1500));
    return call();
  }
  if (action != nullptr && action->error != 0) {
    errno = action->error;
    return -1;
  }
  if (action != nullptr) {
    count = is(*action, "zero") ? 0 : count / 2;
  }
  return call();
}

template <class Call>
auto act(const Action* action, const Call& call) -> decltype(call()) {
  std::size_t none = 0;
  return act(action, none, call);
}

__attribute__((constructor)) void read_environment() {
  const char* fault = std::getenv("TESSERA_FAULT");
  const char* under = std::getenv("TESSERA_FAULT_UNDER");
  const char* rank = std::getenv("TESSERA_FAULT_RANK");
  const char* own = std::getenv("RANK");
  if (under == nullptr || (rank != nullptr && (own == nullptr || std::strcmp(rank, own) != 0))) {
    return;
  }
  set_fault(under, fault == nullptr ? "" : fault);
}

enum Number : std::size_t {
  kOpenat,
  kPwrite,
  kFsync,
  kFallocate,
  kRename,
  kUnlink,
  kPread,
  kClose,
  kLink
};

int open_at(int folder, const char* path, int flags, mode_t mode) {
  const auto call = [&] {
    return act(fault_at(kOpenat, path), [&] {
      return next<int (*)(int, const char*, int, ...)>("openat")(folder, path, flags, mode);
    });
  };
  return (flags & O_CREAT) == 0 ? call() : recorded(call, [&](int fd, Changes& changes) {
    changes.add({.kind = Change::kCreate, .path = path, .file = file_of(fd)});
  });
}

mode_t mode_of(int flags, va_list& arguments) {
  // O_TMPFILE includes the bit of O_DIRECTORY, so all bits of O_TMPFILE must be compared.
  const bool creates = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return creates ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

SystemCallFault::SystemCallFault(const std::filesystem::path& folder, const std::string& fault) {
  set_fault(folder.c_str(), fault.c_str());
}

SystemCallFault::~SystemCallFault() {
  set_fault("", "");
}

int SystemCallFault::calls(const std::string& call) {
  for (std::size_t i = 0; i < kCalls.size(); ++i) {
    if (call == kCalls[i]) {
      const std::lock_guard lock(state().mutex);
      return state().counts[i];
    }
  }
  throw std::runtime_error("no call '" + call + "' is watched");
}

}  // namespace tessera::testing

// Replaces functions of glibc. The headers of glibc can rename functions (open() to open64()).
extern "C" {
using namespace tessera::testing;

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_at(AT_FDCWD, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_at(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}

ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  const auto call = [&] {
    return act(fault_at(kPwrite, fd), count, [&] {
      return next<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite")(fd, bytes, count, offset);
    });
  };
  return recorded(call, [&](ssize_t written, Changes& changes) {
    const std::string_view text(static_cast<const char*>(bytes), static_cast<size_t>(written));
    changes.add(fd, {.kind = Change::kWrite, .offset = offset, .bytes = std::string(text)});
  });
}
ssize_t pwrite64(int fd, const void* bytes, size_t count, off64_t offset) {
  return pwrite(fd, bytes, count, offset);
}

ssize_t pread(int fd, void* bytes, size_t count, off_t offset) {
  return act(fault_at(kPread, fd), count, [&] {
    return next<ssize_t (*)(int, void*, size_t, off_t)>("pread")(fd, bytes, count, offset);
  });
}
ssize_t pread64(int fd, void* bytes, size_t count, off64_t offset) {
  return pread(fd, bytes, count, offset);
}

int fsync(int fd) {
  const auto call = [&] {
    return act(fault_at(kFsync, fd), [&] { return next<int (*)(int)>("fsync")(fd); });
  };
  return recorded(call, [&](int, Changes& changes) { changes.add(fd, {.kind = Change::kSync}); });
}

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  return act(fault_at(kFallocate, fd), [&] {
    return next<int (*)(int, int, off_t, off_t)>("fallocate")(fd, mode, offset, bytes);
  });
}
int fallocate64(int fd, int mode, off64_t offset, off64_t bytes) {
  return fallocate(fd, mode, offset, bytes);
}

int rename(const char* from, const char* to) {
  const auto call = [&] {
    return act(fault_at(kRename, to),
               [&] { return next<int (*)(const char*, const char*)>("rename")(from, to); });
  };
  return recorded(call, [&](int, Changes& changes) {
    changes.add({.kind = Change::kRename, .path = from, .to = to});
  });
}

int link(const char* from, const char* to) {
  const auto call = [&] {
    return act(fault_at(kLink, to),
               [&] { return next<int (*)(const char*, const char*)>("link")(from, to); });
  };
  return recorded(call, [&](int, Changes& changes) {
    changes.add({.kind = Change::kLink, .path = from, .to = to});
  });
}

int unlink(const char* path) {
  const auto call = [&] {
    return act(fault_at(kUnlink, path), [&] { return next<int (*)(const char*)>("unlink")(path); });
  };
  return recorded(
      call, [&](int, Changes& changes) { changes.add({.kind = Change::kUnlink, .path = path}); });
}

int mkdir(const char* path, mode_t mode) {
  const auto call = [&] { return next<int (*)(const char*, mode_t)>("mkdir")(path, mode); };
  return recorded(call, [&](int, Changes& changes) {
    changes.add({.kind = Change::kMakeFolder, .path = path});
  });
}

int rmdir(const char* path) {
  const auto call = [&] { return next<int (*)(const char*)>("rmdir")(path); };
  return recorded(call, [&](int, Changes& changes) {
    changes.add({.kind = Change::kRemoveFolder, .path = path});
  });
}

/// Closes the file even if an error is returned, like Linux.
int close(int fd) {
  const Action* action = fault_at(kClose, fd);
  const int result = next<int (*)(int)>("close")(fd);
  return act(action, [&] { return result; });
}
}
