#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace tessera::comm {

/// Calls, and bytes that one rank puts in, of one kind of collective on one group.
struct Traffic {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;
};
/// Key: {group name, collective}, for example {"tp", "all_gather"}.
using TrafficTable = std::map<std::pair<std::string, std::string>, Traffic>;

/// Counts every collective of one rank, whichever thread issues it. Groups of one rank and
/// barriers are not counted. Thread safe.
class TrafficCounter {
 public:
  void record(const std::string& group, const char* collective, std::int64_t bytes);
  TrafficTable table() const;
  /// What happened since an earlier table().
  TrafficTable since(const TrafficTable& earlier) const;

 private:
  mutable std::mutex mutex_;
  TrafficTable table_;
};
using TrafficCounterPtr = std::shared_ptr<TrafficCounter>;

/// The sum over all entries, or over those of one group.
Traffic total(const TrafficTable& table);
Traffic total(const TrafficTable& table, const std::string& group);

}  // namespace tessera::comm
