#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/export.h"
#include "tessera/optim/optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

// How the library's optimizers are made. step() goes through three classes:
//   SlotOptimizer::update()            takes each slot's local shard and gradient, checks them, and
//                                      makes the state of those that have none yet;
//   BatchedOptimizer::update_shards()  joins shards that adjoin in memory and sorts them into
//                                      batches, one for each type and device;
//   AdamW::update_batch()              calls one fused kernel for a batch.
// Muon, which has to see whole matrices, overrides update_shards() itself.

/// Parameters that share options.
template <class Options>
struct Group {
  std::vector<nn::SlotPtr> parameters;
  Options options = {};
};

/// The local shard of a parameter in a step.
struct ShardUpdate {
  std::size_t index;     ///< its place in Optimizer::parameters()
  std::size_t group;     ///< index of its optimizer group
  at::Tensor parameter;  ///< local, without autograd
  at::Tensor gradient;   ///< local; undefined if there is none
};

/// Base of optimizers that keep state beside local shards. State is made at a parameter's first
/// step, in fp32 where the parameter is narrower. State of shards that adjoin in memory, as FSDP
/// lays out those of a unit, adjoins too.
class SlotOptimizer : public Optimizer {
 public:
  const std::vector<nn::SlotPtr>& parameters() const final { return parameters_; }
  std::vector<StateTensor> state() final;

 protected:
  /// `groups`: the parameters of each group. `state_names`: one tensor of the shard's sizes for
  /// each. `counts_steps`: a counter "step" as well. Throws Error for a slot that is in two groups,
  /// for a null slot, and if there are no parameters; within a group, repeats (tied weights) count
  /// once.
  SlotOptimizer(std::vector<std::vector<nn::SlotPtr>> groups, std::vector<std::string> state_names,
                bool counts_steps);

  /// Updates the shards, which have passed all checks. Gradients are to be multiplied by
  /// `gradient_factor` (see Optimizer::step). If it communicates, step() is collective.
  virtual void update_shards(const std::vector<ShardUpdate>& shards, double gradient_factor) = 0;
  /// The same with a factor on a device (Optimizer::step). By default the gradients are multiplied
  /// in place first.
  virtual void update_shards_scaled(const std::vector<ShardUpdate>& shards,
                                    const at::Tensor& gradient_factor);
  /// Whether a parameter takes part in a step though it has no gradient.
  virtual bool updates_without_gradient(const at::Tensor& /*parameter*/) const { return false; }
  /// The type of the state beside a local shard of `group`. By default fp32 where the shard is
  /// narrower, else the shard's.
  virtual c10::ScalarType state_dtype(std::size_t group, c10::ScalarType parameter) const;

  /// Beside a local shard.
  struct State {
    std::vector<at::Tensor> tensors;  ///< one for each state name
    at::Tensor step;                  ///< 0-d fp32, on the shard's device; undefined if not counted
    std::int64_t steps = 0;           ///< what `step` holds, known without asking the device
    std::uint32_t writes = 0;         ///< those to `step` that `steps` knows of
  };
  /// The state of a parameter that an earlier step has updated.
  State& state_of(std::size_t parameter) { return states_[parameter]; }
  const State& state_of(std::size_t parameter) const { return states_[parameter]; }
  std::size_t group_of(std::size_t parameter) const { return group_of_[parameter]; }
  bool counts_steps() const { return counts_steps_; }

 private:
  void update(double gradient_factor) final;
  void update_scaled(const at::Tensor& gradient_factor) final;
  /// Throws Error, before a step changes anything, for rates that make no sense.
  virtual void check_rates() const {}
  std::vector<ShardUpdate> begin_step();
  void check_parameter(std::size_t index) const;
  void make_states(const std::vector<std::size_t>& indices);
  void read_counters();
  void note_counters();

  std::vector<nn::SlotPtr> parameters_;
  std::vector<std::size_t> group_of_;  // beside parameters_
  std::vector<State> states_;          // beside parameters_
  std::vector<std::string> state_names_;
  bool counts_steps_;
};

/// Shards that one list kernel updates: tensor i of each list belongs to tensor i of the others.
struct Batch {
  std::vector<at::Tensor> parameters, gradients;
  std::vector<std::vector<at::Tensor>> states;  ///< one list for each state name
  std::vector<at::Tensor> steps;                ///< the step now made, from 1; empty if not counted
  /// The place of each tensor's first shard in Optimizer::parameters().
  std::vector<std::size_t> shards = {};
  /// Plain, 0-d fp64, on the device of the batch: what update_batch() multiplies the gradients by
  /// if it has said so (takes_gradient_factor). Undefined: nothing.
  at::Tensor gradient_factor = {};
};

/// Base of optimizers that update each element by itself, with one list kernel for many shards. A
/// few launches then update a whole model. An optimizer of your own derives from
/// GroupedOptimizer<Options, BatchedOptimizer> (compiled and run by OptimizerExample in
/// tests/optim/optimizer_example_test.cpp):
///
///   struct SignSgdOptions { double lr = 1e-3; };
///
///   class SignSgd final : public optim::GroupedOptimizer<SignSgdOptions, optim::BatchedOptimizer>
///   {
///    public:
///     SignSgd(const nn::ModuleBase& module, SignSgdOptions options)
///         : GroupedOptimizer({{optim::slots_of(module), options}}, /*state_names=*/{},
///                            /*counts_steps=*/false) {}
///
///    private:
///     void update_batch(const optim::Batch& batch, std::size_t group) override {
///       at::_foreach_sign_(batch.gradients);
///       at::_foreach_add_(batch.parameters, batch.gradients, -lr(group));
///     }
///   };
class BatchedOptimizer : public SlotOptimizer {
 protected:
  using SlotOptimizer::SlotOptimizer;

  /// Writes the new values into the batch's parameters and states. All tensors are plain, local and
  /// of the type in which the update is computed: fp32 for narrower parameters, whose new values
  /// are then rounded back, a few at a time; of complex numbers the real and imaginary parts, in a
  /// last dimension (at::view_as_real). Gradients are multiplied by the factor of step() and may be
  /// overwritten. Ranks call it with different shards, and not equally often: it must not
  /// communicate. Its exceptions leave step(), on this rank alone, after earlier batches were
  /// updated.
  virtual void update_batch(const Batch& batch, std::size_t group) = 0;
  /// Whether update_batch() multiplies the gradients of this batch itself, by
  /// Batch::gradient_factor. By default they are multiplied before, in place.
  virtual bool takes_gradient_factor(const Batch& /*batch*/, std::size_t /*group*/) const {
    return false;
  }
  /// Whether shards that adjoin in memory may be one tensor of a batch.
  virtual bool joins_shards(std::size_t /*group*/) const { return true; }

 private:
  /// Shards that are updated as one tensor.
  using Run = std::span<const ShardUpdate>;

  /// A number of the host's, or one on a device.
  struct Factor {
    double number = 1.0;
    at::Tensor tensor = {};
  };

  void update_shards(const std::vector<ShardUpdate>& shards, double gradient_factor) final;
  void update_shards_scaled(const std::vector<ShardUpdate>& shards,
                            const at::Tensor& gradient_factor) final;
  void update_groups(const std::vector<ShardUpdate>& shards, const Factor& factor);
  void update_group(Run shards, std::size_t group, const Factor& factor);
  void update_multiplied(Batch& batch, std::size_t group, const Factor& factor);
  void count_step(Run shards);
  bool adjoin_in_memory(const ShardUpdate& before, const ShardUpdate& shard) const;
  std::vector<Run> runs_of(const std::vector<ShardUpdate>& shards) const;
  void add(Batch& batch, Run run) const;
  void update_rounded(Run run, std::size_t group, const Factor& factor);
};

/// The part of an optimizer that holds each group's options, which need a member `lr`. `Base`:
/// SlotOptimizer or BatchedOptimizer.
template <class Options, class Base = SlotOptimizer>
class GroupedOptimizer : public Base {
 public:
  std::size_t groups() const { return options_.size(); }
  /// May be changed between steps. A step throws Error for an lr that is negative or not finite.
  Options& options(std::size_t group = 0) {
    check_group(group);
    return options_[group];
  }
  const Options& options(std::size_t group = 0) const {
    check_group(group);
    return options_[group];
  }
  double lr(std::size_t group = 0) const { return options(group).lr * lr_factor_; }
  void scale_lr(double factor) final { lr_factor_ = factor; }

 protected:
  GroupedOptimizer(std::vector<Group<Options>> groups, std::vector<std::string> state_names,
                   bool counts_steps)
      : Base(slots_of_groups(groups), std::move(state_names), counts_steps) {
    for (Group<Options>& group : groups) {
      options_.push_back(std::move(group.options));
    }
  }

 private:
  void check_group(std::size_t group) const {
    TESSERA_CHECK(group < groups(), "group ", group, " of an optimizer that has ", groups(),
                  " was asked for; groups count from 0");
  }
  void check_rates() const final {
    for (std::size_t group = 0; group < groups(); ++group) {
      TESSERA_CHECK(lr(group) >= 0 && std::isfinite(lr(group)), "a step at the rate ", lr(group),
                    " was asked for, in group ", group,
                    " of an optimizer; set an lr and a factor that are finite and not negative");
    }
  }
  static std::vector<std::vector<nn::SlotPtr>> slots_of_groups(
      const std::vector<Group<Options>>& groups) {
    std::vector<std::vector<nn::SlotPtr>> slots;
    for (const Group<Options>& group : groups) {
      slots.push_back(group.parameters);
    }
    return slots;
  }

  std::vector<Options> options_;
  double lr_factor_ = 1.0;
};

}  // namespace tessera::optim
TESSERA_API_END
