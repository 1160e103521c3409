#pragma once

#include <optional>
#include <string>

#include "parameter/pending_sum.h"
#include "tessera/nn/detail/placeholder_gradient.h"

namespace tessera::fsdp {

/// What stands in `.grad` of a sharded parameter while gradients of it wait for a later reduction.
/// It owns them, so that they go when the program drops the gradient, by whatever means: zero_grad
/// of any optimizer or module, or `grad = {}`. Other operators on it throw Error.
class UnreducedGradient final : public nn::PlaceholderGradient {
 public:
  /// `earlier`: what was in `.grad`; undefined: nothing. `name`: what messages call the parameter.
  UnreducedGradient(const at::Tensor& parameter, at::Tensor earlier, std::string name);

  /// Not reduced at all. Without a value: nothing was set aside; an undefined gradient is none of
  /// this rank's.
  std::optional<UnshardedGradient> kept;
  /// Summed over the ranks that shard, and not over replicas.
  UnshardedGradient scattered;
  /// Reductions are under way whose results are to be added.
  bool expects = false;
  at::Tensor reduced;  ///< of earlier backwards, in the layout of the parameter

  /// Whether nothing waits any more.
  bool is_settled() const { return !kept && !scattered.local.defined() && !expects; }

  [[noreturn]] void refuse() const override;
  /// zero_ and detach, of which zero_grad consists, and add_, by which autograd accumulates.
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void release_resources() override;

 private:
  void drop();

  std::string name_;
};

/// `.grad` of a sharded parameter as one, or nullptr.
UnreducedGradient* unreduced(const at::Tensor& gradient);

}  // namespace tessera::fsdp
