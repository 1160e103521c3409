// For groups whose back end compares nothing itself (Gloo, NCCL): see agree_on_calls().

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "group_info.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// The calls of one rank since the ranks last compared them.
class CallHistory {
 public:
  /// "all_gather for unit 'head'".
  void add(std::string call);

  std::uint64_t count() const { return count_; }
  /// A hash of all calls, in order; the same in every process.
  std::uint64_t hash() const { return hash_; }
  /// The first 4096 of them. A long history is compared by its hash; an error names a call only
  /// among these.
  const std::vector<std::string>& calls() const { return calls_; }
  /// The last; "no call" if there is none.
  const std::string& last() const { return last_; }

 private:
  std::uint64_t count_ = 0;
  std::uint64_t hash_ = hash_of("");
  std::vector<std::string> calls_;
  std::string last_ = "no call";
};

/// Compares the histories of all ranks of `group`, called `ranks` in messages. "" if they are
/// equal; else "call 3 is all_gather for unit 'b' on this rank, all_gather for unit 'a' on ranks 0,
/// 2". Collective. Throws PeerError.
std::string first_difference(const CallHistory& history, Communicator& group,
                             const std::vector<int>& ranks);

}  // namespace tessera::comm
