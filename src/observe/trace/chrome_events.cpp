// Chrome's trace event format: complete events ("X") on threads, and asynchronous ones ("b", "e")
// for what is under way beside them. Times are microseconds.

#include "trace/chrome_events.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/core/atomic_file.h"

namespace tessera::observe {

using nlohmann::ordered_json;
using std::chrono::steady_clock;

namespace {

double in_microseconds(steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

}  // namespace

void ChromeEvents::put(ordered_json event) {
  event["pid"] = rank_;
  text_ += (text_.empty() ? "" : ",\n") + event.dump();
}

double ChromeEvents::microseconds(steady_clock::time_point time) const {
  return in_microseconds(time.time_since_epoch() - origin_);
}

void ChromeEvents::name_process(const std::string& place) {
  const std::string name = "rank " + std::to_string(rank_) + (place.empty() ? "" : ": " + place);
  put({{"name", "process_name"}, {"ph", "M"}, {"args", {{"name", name}}}});
  put({{"name", "process_sort_index"}, {"ph", "M"}, {"args", {{"sort_index", rank_}}}});
}

/// The thread that does something first is the one of the steps.
int ChromeEvents::number_of(std::thread::id thread) {
  const auto [found, is_new] = threads_.emplace(thread, static_cast<int>(threads_.size()));
  if (is_new) {
    const char* name = found->second == 0 ? "training" : "autograd";
    put({{"name", "thread_name"}, {"ph", "M"}, {"tid", found->second}, {"args", {{"name", name}}}});
  }
  return found->second;
}

ordered_json ChromeEvents::slice(const std::string& name, const char* category,
                                 std::thread::id thread, Times times) {
  return {{"name", name},
          {"cat", category},
          {"ph", "X"},
          {"ts", microseconds(times.first)},
          {"dur", in_microseconds(times.second - times.first)},
          {"tid", number_of(thread)}};
}

void ChromeEvents::add(const std::string& name, const char* category, std::thread::id thread,
                       Times times) {
  put(slice(name, category, thread, times));
}

void ChromeEvents::add(const comm::CollectiveCall& call, std::int64_t step) {
  const std::string name = call.collective + " " + call.group;
  ordered_json event = slice(name, "collective", call.thread, {call.began, call.returned});
  event["args"] = {{"collective", call.collective},
                   {"mesh_dimension", call.group},
                   {"bytes", call.bytes},
                   {"purpose", call.purpose},
                   {"exposed_us", in_microseconds(call.exposed())},
                   {"step", step}};
  put(std::move(event));
  if (call.wait_ended > call.wait_began) {
    // Backward's wait may be on the other thread; the slice is where the call was made.
    ordered_json wait =
        slice("wait for " + name, "wait", call.thread, {call.wait_began, call.wait_ended});
    wait["args"] = {{"purpose", call.purpose}};
    put(std::move(wait));
  }
  add_flight(call, name);
}

/// From the call to the end of the wait: those of a group may overlap.
void ChromeEvents::add_flight(const comm::CollectiveCall& call, const std::string& name) {
  const ordered_json id = {{"local", std::to_string(flights_++)}};
  const auto put_end = [&](const char* phase, steady_clock::time_point time) {
    put({{"name", name},
         {"cat", "under way"},
         {"ph", phase},
         {"ts", microseconds(time)},
         {"tid", number_of(call.thread)},
         {"id2", id}});
  };
  put_end("b", call.began);
  put_end("e", std::max(call.returned, call.wait_ended));
}

void write_trace(const std::filesystem::path& path, const std::vector<std::string>& events) {
  if (events.empty()) {
    return;
  }
  std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  for (std::size_t rank = 0; rank < events.size(); ++rank) {
    text += (rank == 0 ? "" : ",\n") + events[rank];
  }
  files::write_file(path, text + "\n]}\n");
}

}  // namespace tessera::observe
