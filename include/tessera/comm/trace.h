#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::comm {

/// Calls, and bytes that one rank puts in, of one kind of collective on one group.
struct Traffic {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;
};
/// Key: {group name, collective}, for example {"tp", "all_gather"}.
using TrafficTable = std::map<std::pair<std::string, std::string>, Traffic>;

/// A single collective of one rank.
struct CollectiveCall {
  std::string group;
  std::string collective;
  std::int64_t bytes = 0;  ///< that this rank puts in
  /// What for: the group's purpose (PurposeScope), else the operator that needs it (CallerScope);
  /// in a backward pass the node of autograd as well ("aten::mm in MmBackward0"). "": not known.
  std::string purpose;
};

/// Counts every collective of one rank, whichever thread issues it. Groups of one rank and
/// barriers are not counted. Thread safe.
class TrafficCounter {
 public:
  /// `purpose` is the group's.
  void record(const std::string& group, const char* collective, std::int64_t bytes,
              const std::string& purpose);
  TrafficTable table() const;
  /// What happened since an earlier table().
  TrafficTable since(const TrafficTable& earlier) const;

 private:
  friend class CallRecorder;

  mutable std::mutex mutex_;
  TrafficTable table_;
  std::vector<std::vector<CollectiveCall>*> lists_;  ///< of the recorders
};
using TrafficCounterPtr = std::shared_ptr<TrafficCounter>;

/// Lists the single collectives that a counter counts while this lives, in the order of their
/// starts. The list grows with every call. Nothing is listed, and nothing made for it, without one.
class CallRecorder {
 public:
  explicit CallRecorder(TrafficCounter& counter);
  CallRecorder(const CallRecorder&) = delete;
  CallRecorder& operator=(const CallRecorder&) = delete;
  ~CallRecorder();

  std::vector<CollectiveCall> calls() const;

 private:
  TrafficCounter& counter_;
  std::vector<CollectiveCall> calls_;
};

/// Names who needs the collectives that this thread starts in a scope: an operator, say. The
/// innermost scope counts. `name` must live as long as the scope.
class CallerScope {
 public:
  explicit CallerScope(std::string_view name) : outer_(name_) { name_ = name; }
  CallerScope(const CallerScope&) = delete;
  CallerScope& operator=(const CallerScope&) = delete;
  ~CallerScope() { name_ = outer_; }

  /// The name in force in this thread, or "".
  static std::string_view current() { return name_; }

 private:
  static inline constinit thread_local std::string_view name_{};
  std::string_view outer_;
};

/// The sum over all entries, or over those of one group.
Traffic total(const TrafficTable& table);
Traffic total(const TrafficTable& table, const std::string& group);

}  // namespace tessera::comm
