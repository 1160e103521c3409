#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "group_info.h"
#include "shm_segment.h"
#include "tessera/core/placement.h"

namespace tessera::comm {

enum class ShmKind : std::int32_t {
  kAllGather,
  kAllReduce,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kBarrier
};

/// One collective, as rounds (see ShmSegment): what this rank writes, and what it then reads.
struct ShmOperation {
  ShmKind kind = ShmKind::kBarrier;
  std::int64_t elements = 0;
  std::int32_t dtype = 0;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::int64_t rounds = 1;
  std::string purpose;
  /// Fills this rank's slot in round 0, 1, ...
  std::function<void(std::int64_t round, std::byte* slot)> produce;
  /// Reads the slots of all ranks, in rank order.
  std::function<void(std::int64_t round, std::span<const std::byte* const> slots)> consume;

  bool done = false;
  std::exception_ptr error;  ///< how it ended, if not well
};
using ShmOperationPtr = std::shared_ptr<ShmOperation>;

/// Runs operations one after another on a segment, comparing what the ranks say they do.
class ShmGroup {
 public:
  ShmGroup(ShmSegment segment, GroupInfo group);

  const GroupInfo& info() const { return group_; }
  std::size_t slot_bytes() const { return segment_.slot_bytes(); }

  /// Finishes the operation before, then does what needs no peer.
  void start(const ShmOperationPtr& operation);
  /// Does the rest. Throws PeerError; throws Error on all ranks if they disagree, and the group
  /// can go on.
  void finish(ShmOperation& operation);
  void abort();

 private:
  void publish(const ShmOperation& operation);
  void produce(const ShmOperation& operation, std::int64_t round);
  std::int64_t agreed_rounds(const ShmOperation& operation);
  void run(ShmOperation& operation);

  ShmSegment segment_;
  GroupInfo group_;
  std::vector<const std::byte*> slots_;
  std::uint32_t round_ = 0;
  std::uint64_t sequence_ = 0;
  bool failed_ = false;
  ShmOperationPtr under_way_;
};

}  // namespace tessera::comm
