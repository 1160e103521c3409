#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "random_snapshot.h"
#include "tessera/dtensor/policy.h"
#include "tessera/dtensor/random.h"

namespace tessera::nn::detail {

/// The state of a thread, beside its tensors, on which a forward's results depend.
class Surroundings {
 public:
  Surroundings(std::span<at::Tensor* const> inputs, bool with_random_state);
  /// Forward has ended: what it did not touch is not kept.
  void settle();

  /// While it lives, on this thread: all is again as it was, and gradients are recorded.
  class Restored {
   public:
    explicit Restored(const Surroundings& then);
    ~Restored();
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    using CastTypes = std::array<c10::ScalarType, 2>;
    c10::AutoGradMode grad_mode_;
    c10::impl::ForceDispatchKeyGuard keys_;  // with them, whether autocast is on
    StrictScope strict_;
    ReplicationScope replication_;
    BatchPart batch_part_;
    CastTypes cast_types_;
    bool cast_cache_;
    std::optional<RandomSnapshot> random_;
  };

 private:
  c10::impl::LocalDispatchKeySet keys_;
  bool strict_;
  bool replicates_plain_;
  std::int64_t batch_part_;
  std::array<c10::ScalarType, 2> cast_types_;
  std::optional<RandomSnapshot> random_;
};

}  // namespace tessera::nn::detail
