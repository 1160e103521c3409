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
  bool used = false;  ///< one came on this rank, also where another rank has all of it by now
};

/// The same gradient as a term of the sum over `pending`, or complete if that is nullptr.
/// Collective over tensor parallelism where a sum must be taken at once.
UnshardedGradient converted(UnshardedGradient gradient, comm::Communicator* pending);

/// Adds `gradient` to `sum`, in `dtype`. If one is complete, it becomes a term of the other's sum.
void add_gradient(UnshardedGradient& sum, const UnshardedGradient& gradient, c10::ScalarType dtype);

/// Over which group the gradients of a parameter are still to be summed when they are reduced. The
/// ranks that reduce them must do the same, but each knows only the layout in which its own
/// gradient came. So they agree, once.
class PendingSum {
 public:
  /// Of a parameter that is distributed so under tensor parallelism; nullopt: plain.
  explicit PendingSum(const std::optional<ShardingSpec>& spec);

  /// nullptr: none. Until the ranks have agreed, a group over which a gradient may be pending,
  /// which is right for complete ones too: it only costs a sum that need not be.
  comm::Communicator* group() const { return group_; }
  /// A gradient that came pending on this rank.
  void note(const UnshardedGradient& gradient);

  /// What this rank tells the others: one flag for each group over which a gradient may be pending.
  /// Empty once they have agreed.
  std::vector<std::uint8_t> flags() const;
  /// `flags`: where any rank has one.
  void agree(std::span<const std::uint8_t> flags);

 private:
  std::vector<comm::Communicator*> possible_;  ///< empty: agreed
  comm::Communicator* group_ = nullptr;
  comm::Communicator* came_ = nullptr;
};

}  // namespace tessera::fsdp
