#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tessera/dtensor/detail/deferred_sums.h"
#include "tessera/nn/parameter.h"

namespace tessera::tensor_parallel {

/// Completes the gradients of replicated parameters under sequence parallelism. Each rank saw a
/// part of the tokens, so its gradient is one term of a sum over the ranks. The terms are kept here
/// and summed together when backward ends, in one all-reduce instead of a small one for each.
///
/// FSDP does not use this class, though it defers the same sums (DeferredSums): it takes a gradient
/// off the leaf before backward ends, keeps the term through gradient accumulation and the
/// reduce-scatter, and sums it where it is smallest, on the shards. There is then no .grad of the
/// leaf to complete. The first caller of leave_gradient_pending() on a leaf completes its gradient:
/// for FSDP's unsharded parameters that is FSDP.
class PendingGradients : public std::enable_shared_from_this<PendingGradients> {
 public:
  /// Watches the leaves that are in these slots now and are replicated. Cheap for leaves that are
  /// watched already.
  void watch(const std::vector<nn::SlotPtr>& slots);

 private:
  struct Term {
    at::Tensor leaf;
    at::Tensor value;
    comm::Communicator* group;
  };

  void watch(const at::Tensor& leaf);
  /// Keeps `gradient` if it is a pending sum. Returns what autograd adds to .grad instead.
  at::Tensor take(const at::Tensor& leaf, const at::Tensor& gradient);
  /// Has settle() called at the end of this backward.
  void begin(int backward);
  /// Sums the kept terms and adds the sums to the leaves' .grad. Collective.
  void settle();

  int backward_ = -1;  ///< autograd's number of the backward under way; -1: none
  std::vector<Term> terms_;
};

}  // namespace tessera::tensor_parallel
