#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tessera/dtensor/deferred_sums.h"
#include "tessera/nn/parameter.h"

namespace tessera::tensor_parallel {

/// Completes the gradients of replicated parameters whose ranks each saw a part of the tokens: they
/// come as terms of a sum, and are summed together when backward ends. Where FSDP holds the
/// parameter it sees to that itself, on the shards.
class PendingGradients : public std::enable_shared_from_this<PendingGradients> {
 public:
  /// What is in these slots now and lies replicated; leaves seen before cost nothing.
  void watch(const std::vector<nn::SlotPtr>& slots);

 private:
  struct Term {
    at::Tensor leaf;
    at::Tensor value;
    comm::Communicator* group;
  };

  void watch(const at::Tensor& leaf);
  /// Takes `gradient` if it is a pending sum, and returns what autograd may add to the leaf's now.
  at::Tensor take(const at::Tensor& leaf, const at::Tensor& gradient);
  void begin(int backward);
  void settle();

  int backward_ = -1;
  std::vector<Term> terms_;
};

}  // namespace tessera::tensor_parallel
