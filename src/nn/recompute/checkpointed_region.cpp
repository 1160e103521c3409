// The regions that a thread is in, innermost first, and their answers to autograd's engine.

#include "recompute/checkpointed_region.h"

#include <mutex>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/internals/detail/engine.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/stand_in_gradient.h"

namespace tessera::nn {
namespace detail {
namespace {

using tessera::detail::BackwardCall;
using tessera::detail::Edge;
using tessera::detail::RunBackward;
using tessera::detail::variable_list;

// Each thread has its own: backward recomputes on autograd's threads.
thread_local CheckpointedRegion* innermost_here = nullptr;

/// The nearest recomputation around this thread's work. Regions inside it replay its recorded
/// counts.
CheckpointedRegion* nearest_replay() {
  CheckpointedRegion* region = innermost_here;
  while (region != nullptr && !region->replays()) {
    region = region->outer();
  }
  return region;
}

std::unique_ptr<tessera::detail::SavedVariableHooks> hooks_here() {
  return innermost_here == nullptr ? nullptr : innermost_here->hooks();
}

/// A stand-in among the outputs knows where their gradients are.
variable_list execute(const BackwardCall& call, const RunBackward& run) {
  for (const Edge& output : call.outputs) {
    if (auto* asked = dynamic_cast<StandInGradient*>(output.function.get())) {
      return asked->execute(call, run);
    }
  }
  return run(call);
}

bool installs_engine() {
  return tessera::detail::install_engine({.hooks = &hooks_here, .execute = &execute});
}

}  // namespace

CheckpointedRegion::CheckpointedRegion() : outer_(std::exchange(innermost_here, this)) {}
CheckpointedRegion::~CheckpointedRegion() {
  innermost_here = outer_;
}
CheckpointedRegion* CheckpointedRegion::innermost() {
  return innermost_here;
}

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    // With Python's engine replaced, its hooks would be lost.
    TESSERA_CHECK(installs_engine(),
                  "activation checkpointing needs its own autograd engine, but this process "
                  "has replaced libtorch's already (Python does); checkpoint there instead");
  });
}

}  // namespace detail

void ask_stand_ins() {
  static std::once_flag once;
  std::call_once(once, [] { detail::installs_engine(); });
}

bool is_recomputing() {
  return detail::nearest_replay() != nullptr;
}

std::uint64_t replayed_count(std::uint64_t& counter) {
  detail::CheckpointedRegion* replay = detail::nearest_replay();
  const std::uint64_t count = replay != nullptr ? replay->replay_count() : counter++;
  // Regions inside the replay record the count, for their own recomputations.
  for (auto* region = detail::CheckpointedRegion::innermost(); region != replay;
       region = region->outer()) {
    region->record_count(count);
  }
  return count;
}

}  // namespace tessera::nn
