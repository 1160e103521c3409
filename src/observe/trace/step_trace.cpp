// Ranks keep times of their hosts' steady clocks. Those of a host agree; the system's clocks, which
// agree well enough, bring hosts together.

#include "tessera/observe/step_trace.h"

#include <algorithm>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/ranks_of_world.h"
#include "texts_on_first.h"
#include "trace/chrome_events.h"

namespace tessera::observe {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;
using std::chrono::system_clock;

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
