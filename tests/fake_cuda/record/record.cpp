#include "record/record.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
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
  // Parentheses, since braces would make a list of the two iterators.
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

void MemoryUse::add(std::int64_t bytes) {
  active += bytes;
  peak = std::max(peak, active);
  ++allocations;
}

void MemoryUse::remove(std::int64_t bytes) {
  active -= bytes;
  ++frees;
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

// The report that a rank writes at its exit: JSON for tests, text for people.
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const MemoryUse& use) {
  return {{"active", use.active},
          {"peak", use.peak},
          {"allocations", use.allocations},
          {"frees", use.frees}};
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
                    {"priority", use.priority},
                    {"launches", use.launches},
                    {"copies", use.copies},
                    {"collectives", use.collectives},
                    {"waits", use.waits}});
  }
  return rows;
}

Json launches_json() {
  Json launches = Json::object();
  for (const auto& [name, count] : record().launches) {
    // Two libraries may contain the same kernel.
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
          {"groups", record().groups},
          {"collectives", collectives_json()}};
}

/// The keys of the rows, most frequent first.
void print_counts(std::ostream& out, const char* title, const Json& counts) {
  std::vector<std::pair<std::int64_t, std::string>> rows;
  std::int64_t sum = 0;
  for (const auto& [name, count] : counts.items()) {
    rows.emplace_back(count.get<std::int64_t>(), name);
    sum += count.get<std::int64_t>();
  }
  std::sort(rows.rbegin(), rows.rend());
  out << "\n" << title << ": " << sum << "\n";
  constexpr std::size_t kWidth = 150;
  for (const auto& [count, name] : rows) {
    out << "  " << count << "  " << name.substr(0, kWidth) << "\n";
  }
}

void print_frames(std::ostream& out, const Json& stack) {
  for (const Json& frame : stack) {
    out << "        " << frame.get<std::string>() << "\n";
  }
}

void print_stacks(std::ostream& out, const char* title, const Json& rows) {
  std::int64_t sum = 0;
  for (const Json& row : rows) {
    sum += row["count"].get<std::int64_t>();
  }
  out << "\n" << title << ": " << sum << "\n";
  for (const Json& row : rows) {
    out << "  " << row["count"] << "  " << row["what"].get<std::string>() << "\n";
    print_frames(out, row["stack"]);
  }
}

/// A row a line, as key=value.
void print_rows(std::ostream& out, const char* title, const Json& rows) {
  out << "\n" << title << ": " << rows.size() << "\n";
  for (const Json& row : rows) {
    for (const auto& [key, value] : row.items()) {
      out << "  " << key << "=" << (value.is_string() ? value.get<std::string>() : value.dump());
    }
    out << "\n";
  }
}

void print(std::ostream& out, const Json& report) {
  out << "Fake CUDA, rank " << report["rank"] << "\n";
  out << "device memory " << report["device_memory"] << "\n";
  out << "pinned memory " << report["pinned_memory"] << "\n";
  print_stacks(out, "Violations", report["violations"]);
  out << "\nContexts: " << report["contexts"].size() << "\n";
  for (const Json& row : report["contexts"]) {
    out << "  device " << row["device"] << "\n";
    print_frames(out, row["stack"]);
  }
  print_rows(out, "Communicators", report["communicators"]);
  print_rows(out, "Collectives (bytes of this rank's input)", report["collectives"]);
  out << "groups of collectives: " << report["groups"] << "\n";
  // PyTorch makes whole pools of streams, most of which stay unused.
  Json used = Json::array();
  for (const Json& row : report["streams"]) {
    if (row["launches"] != 0 || row["copies"] != 0 || row["collectives"] != 0) {
      used.push_back(row);
    }
  }
  print_rows(out, "Streams in use", used);
  print_counts(out, "Launches", report["launches"]);
  print_counts(out, "Matrix products", report["gemms"]);
  print_counts(out, "Calls", report["calls"]);
  print_stacks(out, "Host synchronisations", report["host_syncs"]);
}

/// Renames the file at the end, since the process may be killed while it writes.
void write_whole(const std::string& path, const std::function<void(std::ostream&)>& write) {
  const std::string part = path + ".part";
  {
    std::ofstream out(part);
    write(out);
  }
  std::rename(part.c_str(), path.c_str());
}

}  // namespace

void write_reports() {
  const std::lock_guard lock(record().mutex);
  if (record().calls.empty() || settings().report.empty()) {
    return;
  }
  const std::string stem = settings().report + "." + std::to_string(settings().rank);
  const Json report = report_json();
  write_whole(stem + ".json", [&](std::ostream& out) { out << report.dump(1) << "\n"; });
  write_whole(stem + ".txt", [&](std::ostream& out) { print(out, report); });
}

namespace {

// libtorch's libraries are loaded after the fake, so that their destructors run before this one.
[[gnu::destructor]] void write_reports_at_exit() {
  write_reports();
}

}  // namespace

}  // namespace fake_cuda

extern "C" {

// A program that ends with an error skips the destructors by calling one of these.
void _exit(int code) {
  fake_cuda::write_reports();
  syscall(SYS_exit_group, code);
  __builtin_unreachable();
}

void _Exit(int code) noexcept {
  _exit(code);
}

}  // extern "C"
