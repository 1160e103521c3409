// Ranks keep times of their hosts' steady clocks. Those of a host agree; the system's clocks, which
// agree well enough, bring hosts together.

#include "tessera/observe/step_trace.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/core/atomic_file.h"
#include "texts_on_first.h"

namespace tessera::observe {
namespace {

// Chrome's trace event format: complete events ("X") on threads, and asynchronous ones ("b", "e")
// for what is under way beside them. Times are microseconds.

using nlohmann::ordered_json;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;
using std::chrono::system_clock;

double in_microseconds(steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

/// The events of one rank in Chrome's trace event format, as text: objects with commas between.
class ChromeEvents {
 public:
  using Times = std::pair<steady_clock::time_point, steady_clock::time_point>;

  /// `origin`: when the file's time is 0, by the steady clock.
  ChromeEvents(int rank, nanoseconds origin) : rank_(rank), origin_(origin) {}

  void name_process(const std::string& place) {
    const std::string name = "rank " + std::to_string(rank_) + (place.empty() ? "" : ": " + place);
    put({{"name", "process_name"}, {"ph", "M"}, {"args", {{"name", name}}}});
    put({{"name", "process_sort_index"}, {"ph", "M"}, {"args", {{"sort_index", rank_}}}});
  }
  void add(const std::string& name, const char* category, std::thread::id thread, Times times) {
    put(slice(name, category, thread, times));
  }
  void add(const comm::CollectiveCall& call, std::int64_t step) {
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
  const std::string& text() const { return text_; }

 private:
  void put(ordered_json event) {
    event["pid"] = rank_;
    text_ += (text_.empty() ? "" : ",\n") + event.dump();
  }
  double microseconds(steady_clock::time_point time) const {
    return in_microseconds(time.time_since_epoch() - origin_);
  }
  ordered_json slice(const std::string& name, const char* category, std::thread::id thread,
                     Times times) {
    return {{"name", name},
            {"cat", category},
            {"ph", "X"},
            {"ts", microseconds(times.first)},
            {"dur", in_microseconds(times.second - times.first)},
            {"tid", number_of(thread)}};
  }
  /// The thread that does something first is the one of the steps.
  int number_of(std::thread::id thread) {
    const auto [found, is_new] = threads_.emplace(thread, static_cast<int>(threads_.size()));
    if (is_new) {
      const char* name = found->second == 0 ? "training" : "autograd";
      put({{"name", "thread_name"},
           {"ph", "M"},
           {"tid", found->second},
           {"args", {{"name", name}}}});
    }
    return found->second;
  }
  /// From the call to the end of the wait: those of a group may overlap.
  void add_flight(const comm::CollectiveCall& call, const std::string& name) {
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

  int rank_;
  nanoseconds origin_;
  std::map<std::thread::id, int> threads_;
  int flights_ = 0;
  std::string text_;
};

/// Writes the events of the ranks as a file; does nothing where there are none.
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

/// What is added to a time of the steady clock for one since 1970.
nanoseconds system_offset() {
  const auto steady = steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<nanoseconds>(system_clock::now().time_since_epoch()) - steady;
}

}  // namespace

StepTrace::StepTrace(comm::WorldPtr world) : world_(std::move(world)) {}

void StepTrace::begin_step(std::int64_t step) {
  step_ = step;
  open("step " + std::to_string(step), "step");
  recorder_.emplace(world_->traffic());
}

void StepTrace::end_step() {
  for (comm::CollectiveCall& call : recorder_->calls()) {
    calls_.push_back({std::move(call), step_});
  }
  recorder_.reset();
  while (!open_.empty()) {
    left();
  }
}

void StepTrace::open(std::string name, const char* category) {
  open_.push_back(spans_.size());
  spans_.push_back({std::move(name), category, std::this_thread::get_id(), Clock::now(), {}});
}

void StepTrace::entered(Activity activity, const std::string& name) {
  if (recorder_) {
    open(name, to_string(activity));
  }
}

void StepTrace::left() {
  if (!open_.empty()) {
    spans_[open_.back()].ended = Clock::now();
    open_.pop_back();
  }
}

std::string StepTrace::events(nanoseconds origin, const std::string& place) const {
  ChromeEvents events(world_->rank(), origin);
  events.name_process(place);
  for (const Span& span : spans_) {
    events.add(span.name, span.category, span.thread, {span.began, span.ended});
  }
  for (const Call& call : calls_) {
    events.add(call.call, call.step);
  }
  return events.text();
}

void StepTrace::write(const std::filesystem::path& path, const std::string& place) {
  const nanoseconds offset = system_offset();
  nanoseconds began = spans_.front().began.time_since_epoch() + offset;
  if (world_->size() > 1) {
    const comm::CommunicatorPtr hosts =
        world_->host_group(comm::ranks_of_world(world_->size()), "trace");
    for (const std::vector<std::int64_t>& other :
         comm::gather_values(*hosts, c10::kCPU, {began.count()})) {
      began = std::min(began, nanoseconds(other.front()));
    }
    write_trace(path, texts_on_first(*hosts, events(began - offset, place)));
  } else {
    write_trace(path, {events(began - offset, place)});
  }
  spans_.clear();
  calls_.clear();
}

}  // namespace tessera::observe
