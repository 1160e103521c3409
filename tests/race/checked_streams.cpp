#include "race/checked_streams.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <array>
#include <map>

namespace tessera::race {
namespace {

using comm::Lane;
using comm::StreamEventPtr;

struct Event final : comm::StreamEvent {
  Event(Lane of, Point at) : lane(of), point(std::move(at)) {}
  Lane lane;
  Point point;
};

const Event& event_of(const StreamEventPtr& event) {
  return static_cast<const Event&>(*event);
}

std::string demangled(const char* symbol) {
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(symbol, nullptr, nullptr, nullptr), &std::free);
  std::string text = name != nullptr ? name.get() : symbol;
  return text.substr(0, text.find('('));
}

/// "tessera::fsdp::GatheredState::fill"; of a program, which exports nothing, its name.
std::string function_at(void* address) {
  Dl_info info{};
  dladdr(address, &info);
  return info.dli_sname != nullptr ? demangled(info.dli_sname) : std::string(info.dli_fname);
}

/// The caller of the function `depth` frames up; Streams::order() does not count.
std::string caller(int depth) {
  std::array<void*, 12> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  thread_local std::map<void*, std::string> names;
  for (int i = depth + 1; i < count; ++i) {
    void* const address = frames[static_cast<std::size_t>(i)];
    auto known = names.find(address);
    if (known == names.end()) {
      known = names.emplace(address, function_at(address)).first;
    }
    if (known->second.find("Streams::order") == std::string::npos) {
      return known->second;
    }
  }
  return "unknown";
}

}  // namespace

bool CheckedStreams::is_left_out(const Site& site) {
  sites_.insert(site);
  return site == left_out_;
}

StreamEventPtr CheckedStreams::record(Lane lane) {
  return std::make_shared<Event>(lane, checker_->record(lane));
}

void CheckedStreams::wait(Lane lane, const StreamEventPtr& event) {
  if (event == nullptr) {
    return;
  }
  const Event& end = event_of(event);
  if (!is_left_out(caller(1) + ": " + comm::to_string(lane) + " after " +
                   comm::to_string(end.lane))) {
    checker_->wait(lane, end.point);
  }
}

void CheckedStreams::synchronize(const StreamEventPtr& event) {
  if (event == nullptr) {
    return;
  }
  const Event& end = event_of(event);
  if (!is_left_out(caller(1) + ": the host after " + comm::to_string(end.lane))) {
    checker_->synchronize(end.point);
  }
}

}  // namespace tessera::race
