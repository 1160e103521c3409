#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "tessera/export.h"
#include "tessera/optim/slot_optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// The defaults are those of torch.optim.AdamW.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;          ///< decay of the running mean of gradients
  double beta2 = 0.999;        ///< decay of the running mean of their squares
  double eps = 1e-8;           ///< added to the root of the latter
  double weight_decay = 1e-2;  ///< decoupled: parameters are multiplied by 1 - lr * weight_decay
  /// The type of both means: kFloat or kBFloat16. In bf16 they take half the memory, and are
  /// rounded up or down at random, right in the mean. Those of fp64 and complex parameters keep
  /// their type. Not to be changed after the first step.
  c10::ScalarType moment_dtype = c10::ScalarType::Float;
  /// bf16 means are rounded by random numbers. These depend on this seed, the parameter's FQN, the
  /// element in the whole tensor and the step, not on the mesh. The FQN is that in the whole model,
  /// once somebody has asked it for its slots: ask for them before the first step where optimizers
  /// are made of parts of a model.
  std::uint64_t seed = 0;
};

/// AdamW (Loshchilov & Hutter 2019) over local shards: one fused kernel call for all parameters of
/// a group, a type and a device; shards that adjoin in memory are updated as one tensor. On CUDA
/// the kernel is the library's own for all but fp64: it reads the learning rate, the step and the
/// factor of the gradients on the device. State "exp_avg", "exp_avg_sq", "step".
///
/// Parameters narrower than fp32 have fp32 state, unless moment_dtype says otherwise. They are
/// updated in fp32 and rounded; there is no fp32 copy of them between steps (fairseq's
/// memory-efficient fp16).
///
/// step(): not collective, unless the layout of a gradient differs from its parameter's (a pending
/// sum), which is then redistributed. Parameters without a gradient are skipped. Throws Error,
/// before any parameter changes, for a parameter that is not filled, and for one whose local shard
/// has changed its sizes or device since its first step. Thread safety: one thread at a time.
class AdamW : public GroupedOptimizer<AdamWOptions> {
 public:
  /// Throws Error for options that make no sense.
  explicit AdamW(std::vector<Group<AdamWOptions>> groups);
  AdamW(std::vector<nn::SlotPtr> parameters, AdamWOptions options);
  /// All slots below `module`.
  AdamW(const nn::ModuleBase& module, AdamWOptions options);

 private:
  /// A group's learning rate on a device, and the number that is there.
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

  std::vector<Rate> rates_;  ///< one for each group and device
};

/// The defaults are those of torch.optim.SGD.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  bool nesterov = false;      ///< needs momentum
  double weight_decay = 0.0;  ///< L2: added to the gradient, times the parameter
};

/// Stochastic gradient descent over local shards, with fused kernel calls and fp32 updates of
/// narrower parameters as in AdamW. torch.optim.SGD without dampening. State "momentum_buffer" if a
/// group has momentum.
///
/// step(): collective when AdamW's is, and throws what that throws.
class Sgd : public GroupedOptimizer<SgdOptions> {
 public:
  /// Throws Error for options that make no sense.
  explicit Sgd(std::vector<Group<SgdOptions>> groups);
  Sgd(std::vector<nn::SlotPtr> parameters, SgdOptions options);
  /// All slots below `module`.
  Sgd(const nn::ModuleBase& module, SgdOptions options);

 private:
  void update_batch(const Batch& batch, std::size_t group) override;
};

}  // namespace tessera::optim
TESSERA_API_END
