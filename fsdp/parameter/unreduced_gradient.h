#pragma once

#include <optional>
#include <string>

#include "parameter/pending_sum.h"
#include "tessera/nn/detail/gradients.h"

namespace tessera::fsdp {

/// Stands in `.grad` of a sharded parameter while gradients of it wait for a later reduction. It
/// owns them, so that they are dropped when the program drops the gradient, by any means: zero_grad
/// of an optimizer or module, or `grad = {}`. Other operators on it throw Error.
class UnreducedGradient final : public nn::PlaceholderGradient {
 public:
  /// `earlier`: what was in `.grad`; undefined: nothing. `name`: what messages call the parameter.
  UnreducedGradient(const at::Tensor& parameter, at::Tensor earlier, std::string name);

  /// The gradient that was set aside, not reduced at all. nullopt: nothing was set aside; an
  /// undefined gradient in it: this rank had none.
  std::optional<UnshardedGradient> kept;
  /// Summed over the ranks that shard, and not over replicas.
  UnshardedGradient scattered;
  /// Reductions are under way whose results are to be added.
  bool expects = false;
  at::Tensor reduced;  ///< sum of earlier backwards, in the parameter's layout

  /// Whether nothing waits any more.
  bool is_settled() const { return !kept && !scattered.local.defined() && !expects; }

  [[noreturn]] void refuse() const override;
  /// Runs zero_ and detach, which zero_grad calls, and add_, by which autograd accumulates.
  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void release_resources() override;

 private:
  void drop();

  std::string name_;
};

/// `.grad` of a sharded parameter as one, or nullptr.
UnreducedGradient* unreduced(const at::Tensor& gradient);

}  // namespace tessera::fsdp
