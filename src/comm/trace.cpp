#include "tessera/comm/trace.h"

namespace tessera::comm {

void TrafficCounter::record(const std::string& group, const char* collective, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Traffic& entry = table_[{group, collective}];
  ++entry.calls;
  entry.bytes += bytes;
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
