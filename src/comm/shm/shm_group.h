// One collective after another on a shared segment. The group knows rounds and calls; what the
// bytes mean is known to the operations (shm_communicator.cpp).

#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "group_info.h"
#include "shm/shm_segment.h"
#include "tessera/core/placement.h"

namespace tessera::comm {

/// What a rank calls, as a number that is written to shared memory.
enum class ShmKind : std::int32_t {
  kAllGather,
  kAllReduce,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kBarrier
};

/// One collective as rounds (see ShmSegment): how this rank fills its slot, and how it reads those
/// of all ranks.
struct ShmOperation {
  ShmKind kind = ShmKind::kBarrier;
  std::int64_t elements = 0;
  /// A c10::ScalarType.
  std::int32_t dtype = 0;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::int64_t rounds = 1;
  std::string purpose;
  /// Fills this rank's slot in round 0, 1, ...
  std::function<void(std::int64_t round, std::byte* slot)> produce;
  /// Reads the slots of all ranks, in rank order.
  std::function<void(std::int64_t round, std::span<const std::byte* const> slots)> consume;

  /// Also true once it has failed: it runs once, and each wait() after that throws the same error.
  bool done = false;
  std::exception_ptr error;  ///< nullptr: it has not failed
};
using ShmOperationPtr = std::shared_ptr<ShmOperation>;

/// Runs operations one after another on a segment. In each, the ranks compare their calls.
class ShmGroup {
 public:
  ShmGroup(ShmSegment segment, GroupInfo group);

  const GroupInfo& info() const { return group_; }
  std::size_t slot_bytes() const { return segment_.slot_bytes(); }

  /// Finishes the previous operation, then does the part of this one that needs no peer.
  void start(const ShmOperationPtr& operation);
  /// Does the rest. Throws Error on all ranks if their calls differ; the group can be used
  /// afterwards. Throws PeerError.
  void finish(ShmOperation& operation);
  void abort();

 private:
  void publish(const ShmOperation& operation);
  void produce(const ShmOperation& operation, std::int64_t round);
  std::int64_t agreed_rounds(const ShmOperation& operation);
  void run(ShmOperation& operation);

  ShmSegment segment_;
  GroupInfo group_;
  /// The slots of the current round; a member to spare an allocation in each round.
  std::vector<const std::byte*> slots_;
  /// The last one in which this rank has arrived. It wraps around.
  std::uint32_t round_ = 0;
  /// Calls so far. It is compared, so that a rank that has left one out is found at the next.
  std::uint64_t sequence_ = 0;
  /// A peer is gone or was too late: the rounds of the ranks no longer match.
  bool failed_ = false;
  /// Started and not finished; there is at most one, because it owns the slots.
  ShmOperationPtr under_way_;
};

}  // namespace tessera::comm
