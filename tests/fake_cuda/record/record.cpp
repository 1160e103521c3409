#include "record/record.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

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

Record& record() {
  static auto* const once = new Record;
  return *once;
}

void count_call(const char* name) {
  const std::lock_guard lock(record().mutex);
  ++record().calls[name];
}

void count_host_sync(const char* call) {
  CallStack stack = take_stack();
  const std::lock_guard lock(record().mutex);
  ++record().host_syncs[{call, std::move(stack)}];
}

void count_violation(const std::string& what) {
  CallStack stack = take_stack();
  const std::lock_guard lock(record().mutex);
  ++record().violations[{what, std::move(stack)}];
}

namespace {

using Json = nlohmann::ordered_json;

Json json_of(const MemoryUse& use) {
  return {{"active", use.active}, {"allocations", use.allocations}};
}

Json json_of(const CommunicatorUse& use) {
  return {{"id", use.id},           {"ranks", use.ranks},         {"rank", use.rank},
          {"made_by", use.made_by}, {"finalized", use.finalized}, {"ended_by", use.ended_by},
          {"ended", use.ended}};
}

Json streams_json() {
  Json rows = Json::array();
  for (const auto& [id, use] : record().streams) {
    rows.push_back({{"stream", id},
                    {"device", use.device},
                    {"launches", use.launches},
                    {"copies", use.copies}});
  }
  return rows;
}

Json launches_json() {
  Json launches = Json::object();
  for (const auto& [name, count] : record().launches) {
    // If two libraries contain the same kernel, the numbers of their launches are added up.
    const std::string readable = demangle(name);
    launches[readable] = launches.value(readable, std::int64_t{0}) + count;
  }
  return launches;
}

Json stacks_json(const std::map<std::pair<std::string, CallStack>, std::int64_t>& counts) {
  Json rows = Json::array();
  for (const auto& [what_and_stack, count] : counts) {
    const auto& [what, stack] = what_and_stack;
    rows.push_back({{"what", what}, {"count", count}, {"stack", describe(stack)}});
  }
  return rows;
}

Json collectives_json() {
  Json rows = Json::array();
  for (const auto& [key, use] : record().collectives) {
    rows.push_back({{"communicator", key.communicator},
                    {"collective", key.name},
                    {"type", key.type},
                    {"stream", key.stream},
                    {"priority", key.priority},
                    {"calls", use.calls},
                    {"bytes", use.bytes},
                    {"unaligned", use.unaligned},
                    {"unaligned_part", use.unaligned_part}});
  }
  return rows;
}

Json communicators_json() {
  Json rows = Json::array();
  for (const CommunicatorUse& use : record().communicators) {
    rows.push_back(json_of(use));
  }
  return rows;
}

Json contexts_json() {
  Json rows = Json::array();
  for (const auto& [device, stack] : record().contexts) {
    rows.push_back({{"device", device}, {"stack", describe(stack)}});
  }
  return rows;
}

Json report_json() {
  return {{"rank", settings().rank},
          {"calls", record().calls},
          {"launches", launches_json()},
          {"gemms", record().gemms},
          {"host_syncs", stacks_json(record().host_syncs)},
          {"violations", stacks_json(record().violations)},
          {"contexts", contexts_json()},
          {"device_memory", json_of(record().device_memory)},
          {"pinned_memory", json_of(record().pinned_memory)},
          {"streams", streams_json()},
          {"communicators", communicators_json()},
          {"collectives", collectives_json()}};
}

}  // namespace

void write_reports() {
  const std::lock_guard lock(record().mutex);
  if (record().calls.empty() || settings().report.empty()) {
    return;
  }
  const std::string path = settings().report + "." + std::to_string(settings().rank) + ".json";
  // The report file is renamed when complete, because the process can be killed while it writes.
  const std::string part = path + ".part";
  std::ofstream(part) << report_json().dump(1) << "\n";
  std::rename(part.c_str(), path.c_str());
}

namespace {

// Runs after the destructors of libtorch's libraries, because these are loaded later.
[[gnu::destructor]] void write_reports_at_exit() {
  write_reports();
}

}  // namespace

}  // namespace fake_cuda

extern "C" {

// Replaces libc's _exit(). Writes the reports first, because _exit() runs no destructors.
void _exit(int code) {
  fake_cuda::write_reports();
  syscall(SYS_exit_group, code);
  __builtin_unreachable();
}

void _Exit(int code) noexcept {
  _exit(code);
}

}  // extern "C"
