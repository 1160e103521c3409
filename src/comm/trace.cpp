#include "tessera/comm/trace.h"

#include <torch/csrc/autograd/function.h>

namespace tessera::comm {
namespace {

/// What a call that starts now in this thread is for.
std::string purpose_of_call(const std::string& purpose) {
  std::string text = purpose.empty() ? std::string(CallerScope::current()) : purpose;
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return text;
  return (text.empty() ? "in " : text + " in ") + node->name();
}

}  // namespace

void TrafficCounter::record(const std::string& group, const char* collective, std::int64_t bytes,
                            const std::string& purpose) {
  const std::lock_guard lock(mutex_);
  Traffic& entry = table_[{group, collective}];
  ++entry.calls;
  entry.bytes += bytes;
  for (auto* list : lists_) {
    list->push_back({group, collective, bytes, purpose_of_call(purpose)});
  }
}

TrafficTable TrafficCounter::table() const {
  const std::lock_guard lock(mutex_);
  return table_;
}

TrafficTable TrafficCounter::since(const TrafficTable& earlier) const {
  TrafficTable now = table();
  for (const auto& [key, before] : earlier) {
    Traffic& entry = now[key];
    entry.calls -= before.calls;
    entry.bytes -= before.bytes;
  }
  std::erase_if(now, [](const auto& item) { return item.second.calls == 0; });
  return now;
}

CallRecorder::CallRecorder(TrafficCounter& counter) : counter_(counter) {
  const std::lock_guard lock(counter_.mutex_);
  counter_.lists_.push_back(&calls_);
}

CallRecorder::~CallRecorder() {
  const std::lock_guard lock(counter_.mutex_);
  std::erase(counter_.lists_, &calls_);
}

std::vector<CollectiveCall> CallRecorder::calls() const {
  const std::lock_guard lock(counter_.mutex_);
  return calls_;
}

Traffic total(const TrafficTable& table) {
  Traffic sum;
  for (const auto& [key, entry] : table) {
    sum.calls += entry.calls;
    sum.bytes += entry.bytes;
  }
  return sum;
}

Traffic total(const TrafficTable& table, const std::string& group) {
  Traffic sum;
  for (const auto& [key, entry] : table) {
    if (key.first == group) {
      sum.calls += entry.calls;
      sum.bytes += entry.bytes;
    }
  }
  return sum;
}

}  // namespace tessera::comm
