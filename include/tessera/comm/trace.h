#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Counts of the calls of one kind of collective in one process group.
struct Traffic {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  ///< bytes of this rank's inputs
};
/// The traffic of each process group and collective. Key: {group name, collective}, for example
/// {"tp", "all_gather"}.
using TrafficTable = std::map<std::pair<std::string, std::string>, Traffic>;

/// A single collective of one rank.
struct CollectiveCall {
  std::string group;
  std::string collective;
  std::int64_t bytes = 0;  ///< bytes of this rank's input
  /// The purpose of the group (PurposeScope). If the group has no purpose: the operator that needs
  /// the collective (CallerScope), in backward with the autograd node ("aten::mm in MmBackward0").
  /// "" if unknown.
  std::string purpose;
};

/// Counts all collectives of one rank, on any thread, except barriers and the collectives of groups
/// of one rank. Thread safe.
class TrafficCounter {
 public:
  /// Counts a call. `purpose`: the group's purpose.
  void record(const std::string& group, const char* collective, std::int64_t bytes,
              const std::string& purpose);
  TrafficTable table() const;
  /// The traffic since `earlier`, an earlier result of table().
  TrafficTable since(const TrafficTable& earlier) const;

 private:
  friend class CallRecorder;

  mutable std::mutex mutex_;
  TrafficTable table_;
  std::vector<std::vector<CollectiveCall>*> lists_;  ///< the lists of the recorders
};
/// A shared pointer to a counter, used by a world and its groups.
using TrafficCounterPtr = std::shared_ptr<TrafficCounter>;

/// Lists the individual collectives that a counter counts while the recorder exists, in the order
/// in which they start. The list grows with every call, so use a recorder for a step and not for a
/// whole training run. Without a recorder no list is made. Thread safe.
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

/// While this object exists, `name` is the caller, such as an operator, of the collectives that
/// this thread starts. The innermost scope applies. `name` must live as long as the scope.
class CallerScope {
 public:
  explicit CallerScope(std::string_view name) : outer_(name_) {
    name_ = name;
    if (outer_.empty()) {
      outermost_ = name;
    }
  }
  CallerScope(const CallerScope&) = delete;
  CallerScope& operator=(const CallerScope&) = delete;
  ~CallerScope() {
    name_ = outer_;
    if (outer_.empty()) {
      outermost_ = {};
    }
  }

  /// The name of this thread's innermost CallerScope; "" if there is none.
  static std::string_view current() { return name_; }
  /// The name of this thread's outermost CallerScope, which is the function that the program
  /// called; "" if there is none.
  static std::string_view outermost() { return outermost_; }

 private:
  static inline constinit thread_local std::string_view name_{};
  static inline constinit thread_local std::string_view outermost_{};
  std::string_view outer_;
};

/// The sum over all entries of a traffic table.
Traffic total(const TrafficTable& table);
/// The sum over the entries of one group in a traffic table.
Traffic total(const TrafficTable& table, const std::string& group);

}  // namespace tessera::comm
TESSERA_API_END
