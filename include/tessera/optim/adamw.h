#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "tessera/export.h"
#include "tessera/optim/slot_optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// Options of AdamW.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;          ///< decay factor of the running mean of the gradients
  double beta2 = 0.999;        ///< decay factor of the running mean of the squared gradients
  double eps = 1e-8;           ///< term added to the square root of exp_avg_sq
  double weight_decay = 1e-2;  ///< weight decay: parameters are multiplied by 1 - lr * weight_decay
  /// The dtype of the two running means: kFloat or kBFloat16 (half the memory, stochastic
  /// rounding). fp64 and complex parameters ignore this option. Must not be changed after the first
  /// step.
  c10::ScalarType moment_dtype = c10::ScalarType::Float;
  /// Seed of the stochastic rounding of bf16 means. Random numbers depend on the seed, the FQN, the
  /// element's global index and the step, not on the mesh. If optimizers get parts of a model, call
  /// named_slots() of the whole model before the first step, to set the FQNs.
  std::uint64_t seed = 0;
};

/// AdamW (Loshchilov & Hutter 2019) over local shards, with a fused kernel. State: "exp_avg",
/// "exp_avg_sq", "step". Parameters narrower than fp32 are updated in fp32 and rounded. Their state
/// is fp32, unless moment_dtype sets another dtype.
///
/// Parameters without a gradient are skipped. step() is collective only for gradients with other
/// placements than their parameters (Partial gradients), which are redistributed. Throws Error,
/// before any update, for an uninitialized parameter. Throws Error for a local shard whose sizes or
/// device changed after the first step. Thread safety: one thread at a time.
class AdamW : public GroupedOptimizer<AdamWOptions> {
 public:
  /// The constructor throws Error for invalid options.
  explicit AdamW(std::vector<Group<AdamWOptions>> groups);
  AdamW(std::vector<nn::SlotPtr> parameters, AdamWOptions options);
  /// Makes an optimizer for all parameters of `module` and its submodules.
  AdamW(const nn::ModuleBase& module, AdamWOptions options);

 private:
  struct Rate {
    std::size_t group;
    double value;
    at::Tensor tensor;
  };

  c10::ScalarType state_dtype(std::size_t group, c10::ScalarType parameter) const override;
  bool takes_gradient_factor(const Batch& batch, std::size_t group) const override;
  bool joins_shards(std::size_t group) const override;
  void update_batch(const Batch& batch, std::size_t group) override;
  void update_by_kernel(const Batch& batch, std::size_t group);
  at::Tensor rate_on(c10::Device device, std::size_t group);

  std::vector<Rate> rates_;
};

/// Options of Sgd.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  bool nesterov = false;      ///< whether to use Nesterov momentum, which requires momentum
  double weight_decay = 0.0;  ///< L2 penalty: weight_decay * parameter is added to the gradient
};

/// Stochastic gradient descent over local shards, like torch.optim.SGD without dampening. State:
/// "momentum_buffer" if a group has momentum. step() has the fp32 updates, collectives and Errors
/// of AdamW.
class Sgd : public GroupedOptimizer<SgdOptions> {
 public:
  /// The constructor throws Error for invalid options.
  explicit Sgd(std::vector<Group<SgdOptions>> groups);
  Sgd(std::vector<nn::SlotPtr> parameters, SgdOptions options);
  /// Makes an optimizer for all parameters of `module` and its submodules.
  Sgd(const nn::ModuleBase& module, SgdOptions options);

 private:
  void update_batch(const Batch& batch, std::size_t group) override;
};

}  // namespace tessera::optim
TESSERA_API_END
