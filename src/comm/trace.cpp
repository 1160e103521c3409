// Counts the collectives of a rank, for CheckedCommunicator. A mutex protects the counters, because
// forward and backward run on different threads.

#include "tessera/comm/detail/recording.h"

#include "tessera/internals/detail/backward.h"

namespace tessera::comm {
namespace {

/// Returns a qualified name without namespaces and classes: "GatherSequenceFunction" for
/// "tessera::nn::GatherSequenceFunction".
std::string short_name(const std::string& name) {
  const std::size_t scope = name.substr(0, name.find('<')).rfind("::");
  return scope == std::string::npos ? name : name.substr(scope + 2);
}

std::string purpose_of_call(const std::string& purpose) {
  if (!purpose.empty()) {
    return purpose;
  }
  std::string text(CallerScope::current());
  // In backward, the name of the autograd node is added, because the operator's name does not show
  // which gradient needs the collective.
  const std::string node = tessera::detail::running_node();
  if (node.empty()) {
    return text;
  }
  return (text.empty() ? "in " : text + " in ") + short_name(node);
}

}  // namespace

void TrafficCounter::record(const std::string& group, const char* collective, std::int64_t bytes,
                            const std::string& purpose) {
  const std::lock_guard lock(mutex_);
  Traffic& entry = table_[{group, collective}];
  ++entry.calls;
  entry.bytes += bytes;
  if (!lists_.empty()) {
    const CollectiveCall call{group, collective, bytes, purpose_of_call(purpose)};
    for (auto* list : lists_) {
      list->push_back(call);
    }
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
  // Collectives that were not called since `earlier` are omitted.
  std::erase_if(now, [](const auto& item) { return item.second.calls == 0; });
  return now;
}

/// The TrafficCounter appends calls to `calls_` until ~CallRecorder().
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

Traffic total(const TrafficTable& table, const std::string& group) {
  Traffic sum;
  for (const auto& [key, entry] : table) {
    if (group.empty() || key.first == group) {
      sum.calls += entry.calls;
      sum.bytes += entry.bytes;
    }
  }
  return sum;
}

}  // namespace tessera::comm
