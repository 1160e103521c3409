// Regions that a thread is in, innermost first, and the autograd engine that asks them. libtorch
// asks its default engine for the hooks of each tensor that it saves: that is the only way in that
// C++ has.

#include "recompute/region.h"

#include <mutex>
#include <utility>

#include "recompute/checkpoint_engine.h"
#include "tessera/core/error.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/stand_in_gradient.h"

namespace tessera::nn {
namespace detail {
namespace {

using torch::autograd::Engine;

// Each thread has its own: backward recomputes on autograd's threads.
thread_local Region* innermost_here = nullptr;

/// The nearest recomputation around this thread's work, from which the regions inside it take what
/// they record.
Region* nearest_replay() {
  Region* region = innermost_here;
  while (region != nullptr && !region->replays()) {
    region = region->outer();
  }
  return region;
}

Engine& checkpoint_engine() {
  // Lives to the end of the process, as autograd's threads do.
  static CheckpointEngine engine;
  return engine;
}

/// Whether the process has this engine from now on. The first call decides.
bool installs_engine() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Engine& current = Engine::get_default_engine();
  if (&current == &Engine::get_base_engine()) {
    torch::autograd::set_default_engine_stub(&checkpoint_engine);
    return true;
  }
  return dynamic_cast<CheckpointEngine*>(&current) != nullptr;
}

}  // namespace

std::unique_ptr<torch::autograd::SavedVariableHooks>
CheckpointEngine::get_default_saved_variable_hooks() {
  return innermost_here == nullptr ? nullptr : innermost_here->hooks();
}

torch::autograd::variable_list CheckpointEngine::execute(
    const torch::autograd::edge_list& roots, const torch::autograd::variable_list& gradients,
    bool keep_graph, bool create_graph, bool accumulate,
    const torch::autograd::edge_list& outputs) {
  const RunBackward run = [this](const BackwardCall& call) {
    return Engine::execute(call.roots, call.gradients, call.keep_graph, call.create_graph,
                           call.accumulate, call.outputs);
  };
  // A whole backward has no outputs.
  for (const torch::autograd::Edge& output : outputs) {
    if (auto* asked = dynamic_cast<StandInGradient*>(output.function.get())) {
      return asked->execute({roots, gradients, keep_graph, create_graph, accumulate, outputs}, run);
    }
  }
  return Engine::execute(roots, gradients, keep_graph, create_graph, accumulate, outputs);
}

Region::Region() : outer_(std::exchange(innermost_here, this)) {}
Region::~Region() {
  innermost_here = outer_;
}
Region* Region::innermost() {
  return innermost_here;
}

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    // With Python's engine replaced, its hooks would be lost.
    TESSERA_CHECK(installs_engine(),
                  "activation checkpointing needs an autograd engine of its own, but this process "
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
  detail::Region* replay = detail::nearest_replay();
  const std::uint64_t count = replay != nullptr ? replay->replay_count() : counter++;
  // Regions inside the replay record what it gave, for recomputations of their own.
  for (auto* region = detail::Region::innermost(); region != replay; region = region->outer()) {
    region->record_count(count);
  }
  return count;
}

}  // namespace tessera::nn
