#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/random.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/threads.h"

namespace tessera::nn::detail {

/// The states of random number generators: this thread's of tessera::manual_seed, and libtorch's of
/// the CPU and other devices.
class RandomSnapshot {
 public:
  /// Those of the CPU and of the devices of `tensors`.
  explicit RandomSnapshot(std::span<at::Tensor* const> tensors);

  /// The current states of the same generators.
  RandomSnapshot retaken() const;
  void restore() const;
  /// Forgets libtorch's generators whose state has not changed: they were not used, and need no
  /// replay.
  void forget_unmoved();

 private:
  struct State {
    at::Generator generator;
    at::Tensor value;
  };
  RandomSnapshot() = default;

  RandomState ours_ = random_state();
  std::vector<State> states_;
};

/// The state of a thread on which the results of a forward depend, besides its tensors: dispatch
/// keys with autocast, strict and replication scopes, the part of the batch (RandomRegion), and
/// random number generators.
class ThreadState {
 public:
  ThreadState(std::span<at::Tensor* const> inputs, bool with_random_state);
  /// To be called after forward: forgets the generators that it did not use.
  void settle();

  /// While it lives, this thread has that state again, and gradients are recorded.
  class Restored {
   public:
    explicit Restored(const ThreadState& then);
    ~Restored();
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    // What the thread had before, in the order in which it is changed; destroyed in reverse.
    c10::AutoGradMode grad_mode_;
    tessera::detail::RestoreKeys keys_;  // with them, whether autocast is on
    StrictScope strict_;
    ReplicationScope replication_;
    tessera::detail::RandomRegionScope region_;
    tessera::detail::AutocastState autocast_;
    std::optional<RandomSnapshot> random_;
  };

 private:
  tessera::detail::KeysOfThread keys_;
  bool strict_;
  bool replicates_plain_;
  tessera::detail::RandomRegionPtr region_;
  tessera::detail::AutocastState autocast_;
  std::optional<RandomSnapshot> random_;
};

}  // namespace tessera::nn::detail
