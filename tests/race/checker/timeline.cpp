#include "race/checker/timeline.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/comm/streams.h"

namespace tessera::race {
namespace {

/// As RaceChecker numbers them.
std::string name_of_queue(std::size_t queue) {
  if (queue < 4) {
    return comm::to_string(static_cast<comm::Lane>(queue));
  }
  return queue == 4 ? "host" : "network";
}

}  // namespace

Moment Timeline::now(std::size_t queue) const {
  return queue < now_.size() ? now_[queue] : Moment{};
}

void Timeline::wait(std::size_t queue, const Moment& moment) {
  now_.resize(std::max(now_.size(), queue + 1));
  Moment& now = now_[queue];
  if (moment.time <= now.time) {
    return;
  }
  if (queue == 0) {
    stalls_.push_back({queue, moment.cause, {}, now.time, moment.time});
  }
  now = moment;
}

void Timeline::run(std::size_t queue, const std::string& name, const std::string& detail,
                   double microseconds) {
  if (microseconds <= 0) {
    return;
  }
  now_.resize(std::max(now_.size(), queue + 1));
  const double begin = now_[queue].time;
  now_[queue] = {begin + microseconds, name};
  spans_.push_back({queue, name, detail, begin, begin + microseconds});
}

std::string Timeline::chrome_trace(int rank) const {
  nlohmann::json events = nlohmann::json::array();
  for (const Span& span : spans_) {
    events.push_back({{"name", span.name},
                      {"ph", "X"},
                      {"ts", span.begin},
                      {"dur", span.end - span.begin},
                      {"pid", rank},
                      {"tid", name_of_queue(span.queue)},
                      {"args", {{"detail", span.detail}}}});
  }
  return events.dump();
}

}  // namespace tessera::race
