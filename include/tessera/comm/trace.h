#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// The calls of one kind of collective on one group.
struct Traffic {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  ///< of the inputs of this rank
  /// That this rank sent to other hosts, as Gloo's algorithms move them; 0 with NCCL.
  std::int64_t link_bytes = 0;
};
/// Key: {group name, collective}, for example {"tp", "all_gather"}.
using TrafficTable = std::map<std::pair<std::string, std::string>, Traffic>;

/// A single collective of one rank.
struct CollectiveCall {
  using Clock = std::chrono::steady_clock;

  std::string group;
  std::string collective;
  std::int64_t bytes = 0;  ///< of this rank's input
  /// The group's purpose (PurposeScope) or, without one, the operator that needs the call
  /// (CallerScope), and in a backward pass autograd's node ("aten::mm in MmBackward0"). "": not
  /// known.
  std::string purpose;
  std::thread::id thread{};      ///< that made the call
  Clock::time_point began{};     ///< when it was called
  Clock::time_point returned{};  ///< when the call returned, with the collective under way
  /// When the first Work::wait() for it began and ended; null if it was not waited for.
  Clock::time_point wait_began{}, wait_ended{};

  /// How long a thread was held up by it: in the call and in the wait. With CUDA the host only
  /// issues both, and the device may continue meanwhile.
  Clock::duration exposed() const { return (returned - began) + (wait_ended - wait_began); }
};
/// Shared by the recorders and by the code that notes its times.
using CollectiveCallPtr = std::shared_ptr<CollectiveCall>;

/// Counts every collective of one rank, whichever thread issues it, except in groups of one rank
/// and barriers. Thread safe.
class TrafficCounter {
 public:
  /// `purpose` is the group's. Returns the call as recorders have it, whose times are to be noted;
  /// nullptr without a recorder.
  CollectiveCallPtr record(const std::string& group, const char* collective, std::int64_t bytes,
                           const std::string& purpose);
  /// Adds to the `link_bytes` of what was recorded.
  void add_link_bytes(const std::string& group, const char* collective, std::int64_t bytes);
  /// Sets one of a call's times to now.
  void note(CollectiveCall& call, CollectiveCall::Clock::time_point CollectiveCall::*time);
  TrafficTable table() const;
  /// table() less an earlier one.
  TrafficTable since(const TrafficTable& earlier) const;

 private:
  friend class CallRecorder;

  mutable std::mutex mutex_;
  TrafficTable table_;
  std::vector<std::vector<CollectiveCallPtr>*> lists_;  ///< the lists of the recorders
};
/// Shared by a world and its groups.
using TrafficCounterPtr = std::shared_ptr<TrafficCounter>;

/// Lists the single collectives that a counter counts while the recorder lives, in the order in
/// which they start. The list grows with every call, so keep a recorder for a step, not for a
/// training run. Without a recorder no call is listed, at no cost. Thread safe.
class CallRecorder {
 public:
  explicit CallRecorder(TrafficCounter& counter);
  CallRecorder(const CallRecorder&) = delete;
  CallRecorder& operator=(const CallRecorder&) = delete;
  ~CallRecorder();

  std::vector<CollectiveCall> calls() const;

 private:
  TrafficCounter& counter_;
  std::vector<CollectiveCallPtr> calls_;
};

/// Names the caller, such as an operator, of the collectives that this thread starts in a scope.
/// The innermost scope counts. `name` must live as long as the scope.
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

  /// The name in force in this thread, or "".
  static std::string_view current() { return name_; }
  /// The name of the outermost scope of this thread, which is what the program called, or "".
  static std::string_view outermost() { return outermost_; }

 private:
  static inline constinit thread_local std::string_view name_{};
  static inline constinit thread_local std::string_view outermost_{};
  std::string_view outer_;
};

/// The sum over all entries, or over those of one group.
Traffic total(const TrafficTable& table);
/// The sum over the entries of one group.
Traffic total(const TrafficTable& table, const std::string& group);

}  // namespace tessera::comm
TESSERA_API_END
