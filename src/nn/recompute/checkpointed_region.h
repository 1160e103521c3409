#pragma once

#include <cstdint>
#include <memory>

#include "tessera/internals/detail/graph.h"

namespace tessera::nn::detail {

/// The call of a checkpointed function that this thread is in: its forward, or its recomputation.
/// Regions nest; the innermost one decides what autograd keeps for backward.
class CheckpointedRegion {
 public:
  CheckpointedRegion();
  virtual ~CheckpointedRegion();
  CheckpointedRegion(const CheckpointedRegion&) = delete;
  CheckpointedRegion& operator=(const CheckpointedRegion&) = delete;

  /// The hooks of the next tensor that autograd wants to keep.
  virtual std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() = 0;
  /// Whether this is a recomputation. If so, replay_count() gives the counts that the forward
  /// recorded, one after another; see replayed_count().
  virtual bool replays() const = 0;
  virtual std::uint64_t replay_count() = 0;
  virtual void record_count(std::uint64_t count) = 0;

  CheckpointedRegion* outer() const { return outer_; }
  static CheckpointedRegion* innermost();

 private:
  // Regions are on the stack, so that the one around outlives this one.
  CheckpointedRegion* outer_;
};

/// Makes autograd ask the innermost region of a thread how to keep tensors for backward; once for
/// the process. Throws Error if another autograd engine than libtorch's own is installed (Python
/// brings one): replacing it would break its users.
void install_engine();

}  // namespace tessera::nn::detail
