#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::fsdp {

/// The local part of an unsharded parameter's gradient.
struct UnshardedGradient {
  at::Tensor local;  ///< undefined: none came
  /// Other ranks hold terms of it too: to be summed over this group. nullptr: it is complete.
  comm::Communicator* pending = nullptr;
  bool used = false;   ///< a gradient came on this rank, also if another rank holds all of it now
  double divisor = 1;  ///< it was divided by, before a sum in fp16
};

/// The same gradient as a term of the sum over `pending`, or complete if that is nullptr.
/// Collective over tensor parallelism where a sum must be taken at once.
UnshardedGradient converted(UnshardedGradient gradient, comm::Communicator* pending);

/// Adds `gradient` to `sum`, in `dtype`, divided as the sum is. If one is complete, it becomes a
/// term of the other's sum.
void add_gradient(UnshardedGradient& sum, const UnshardedGradient& gradient, c10::ScalarType dtype);

/// The group over which the gradients of a parameter are still to be summed when they are reduced.
/// The ranks that reduce them must do the same, but each knows only the layout of its own gradient.
/// So they agree, once.
class PendingSum {
 public:
  /// For a parameter that tensor parallelism has distributed as `spec`; nullopt: plain.
  explicit PendingSum(const std::optional<ShardingSpec>& spec);

  /// nullptr: none. Until the ranks have agreed, a group over which a gradient may be pending. That
  /// is right for complete gradients too, but costs an unnecessary sum.
  comm::Communicator* group() const { return group_; }
  /// A gradient that came pending on this rank.
  void note(const UnshardedGradient& gradient);

  /// This rank's part of the agreement: one flag for each group over which a gradient may be
  /// pending. Empty once they have agreed.
  std::vector<std::uint8_t> flags() const;
  /// `flags`: set if they are set on any rank.
  void agree(std::span<const std::uint8_t> flags);

 private:
  std::vector<comm::Communicator*> possible_;  ///< empty: agreed
  comm::Communicator* group_ = nullptr;
  comm::Communicator* came_ = nullptr;
};

}  // namespace tessera::fsdp
