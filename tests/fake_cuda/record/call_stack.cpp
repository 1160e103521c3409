#include "record/call_stack.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <sstream>

namespace fake_cuda {
namespace {

const void* library_of(const void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

std::string describe_frame(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0) {
    return "?";
  }
  if (info.dli_sname != nullptr) {
    return demangle(info.dli_sname);
  }
  const std::string path = info.dli_fname;
  std::ostringstream text;
  text << path.substr(path.rfind('/') + 1) << "+0x" << std::hex
       << reinterpret_cast<std::uintptr_t>(address) -
              reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  return text.str();
}

}  // namespace

CallStack take_stack() {
  std::array<void*, 48> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  static const void* const self = library_of(reinterpret_cast<const void*>(&take_stack));
  int first = 0;
  while (first < count && library_of(frames.at(static_cast<std::size_t>(first))) == self) {
    ++first;
  }
  // In parentheses: braces would make a list of the two iterators.
  return CallStack(frames.begin() + first, frames.begin() + count);
}

std::vector<std::string> describe(const CallStack& stack) {
  std::vector<std::string> lines;
  lines.reserve(stack.size());
  for (void* const address : stack) {
    lines.push_back(describe_frame(address));
  }
  return lines;
}

std::string demangle(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

}  // namespace fake_cuda
