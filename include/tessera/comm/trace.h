#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// The number and the input bytes of the calls of one collective (all_gather, for example) in one
/// process group.
struct Traffic {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  ///< sum of the bytes of this rank's inputs
};
/// The traffic of each process group and collective. Key: {group name, collective}, for example
/// {"tp", "all_gather"}.
using TrafficTable = std::map<std::pair<std::string, std::string>, Traffic>;

/// A single collective of one rank.
struct CollectiveCall {
  std::string group;
  std::string collective;
  std::int64_t bytes = 0;  ///< bytes of the collective's input on this rank
  /// The purpose of the process group (PurposeScope) or, without a purpose, the operator that
  /// called the collective. In backward the autograd node follows: "aten::mm in MmBackward0". "" if
  /// unknown.
  std::string purpose;
};

class CallRecorder;

/// Counts all collectives of one rank, on all threads, except barriers and the collectives of
/// groups of one rank. Thread safe.
class TrafficCounter {
 public:
  /// Counts a collective. `purpose`: the string for CollectiveCall::purpose.
  void record(const std::string& group, const char* collective, std::int64_t bytes,
              const std::string& purpose);
  TrafficTable table() const;
  /// Returns the traffic since the snapshot `earlier`, an earlier result of table().
  TrafficTable since(const TrafficTable& earlier) const;

 private:
  friend class CallRecorder;

  mutable std::mutex mutex_;
  TrafficTable table_;
  std::vector<std::vector<CollectiveCall>*> lists_;
};

/// Adds up the traffic of process group `group`, or of all groups if `group` is "".
Traffic total(const TrafficTable& table, const std::string& group = {});

}  // namespace tessera::comm
TESSERA_API_END
