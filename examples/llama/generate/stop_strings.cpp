#include "examples/llama/generate/stop_strings.h"

#include <algorithm>
#include <utility>

namespace llama {

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {}

std::string StopStrings::push(std::string_view piece) {
  if (stopped_) {
    return "";
  }
  pending_ += piece;
  std::size_t shown = pending_.size() - held_back();
  for (const std::string& stop : stops_) {
    const std::size_t found = pending_.find(stop);
    if (found != std::string::npos) {
      shown = stopped_ ? std::min(shown, found) : found;
      stopped_ = true;
    }
  }
  std::string text = pending_.substr(0, shown);
  pending_.erase(0, shown);
  return text;
}

std::string StopStrings::finish() {
  return stopped_ ? "" : std::exchange(pending_, "");
}

/// How much of the end of the text may begin a stop.
std::size_t StopStrings::held_back() const {
  std::size_t most = 0;
  for (const std::string& stop : stops_) {
    std::size_t length = std::min(stop.size() - 1, pending_.size());
    while (length > most && !pending_.ends_with(std::string_view(stop).substr(0, length))) {
      --length;
    }
    most = std::max(most, length);
  }
  return most;
}

}  // namespace llama
