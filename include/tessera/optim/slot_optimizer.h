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

/// A group of parameters with common options.
template <class Options>
struct Group {
  std::vector<nn::SlotPtr> parameters;
  Options options = {};
};

struct ShardUpdate;

/// Local shards for one call of update_batch(). Tensors with the same index in all lists belong to
/// the same shard.
struct Batch {
  std::vector<at::Tensor> parameters, gradients;
  std::vector<std::vector<at::Tensor>> states;  ///< one list of state tensors for each state name
  std::vector<at::Tensor> steps;  ///< step number of each shard, from 1; empty if not counted
  /// For each tensor, the index of its parameter in Optimizer::parameters(). If a tensor consists
  /// of adjacent shards of several parameters, the index of the first of these parameters.
  std::vector<std::size_t> shards = {};
  /// For optimizers with takes_gradient_factor(): the factor for the gradients in update_batch().
  /// Plain, 0-d fp64, on the batch's device; undefined means 1. For a NaN or infinite factor,
  /// update_batch() must change nothing, and the step is not counted.
  at::Tensor gradient_factor = {};
};

/// Base class of optimizers with state for local shards; derive from GroupedOptimizer<Options>. A
/// step checks shards and gradients, creates missing state (at least fp32) and calls update_batch()
/// for each batch of one dtype and device. Shards that are adjacent in memory are joined, and their
/// states are adjacent, too.
class SlotOptimizer : public Optimizer {
 public:
  const std::vector<nn::SlotPtr>& parameters() const final { return parameters_; }
  std::vector<StateTensor> state() final;

 protected:
  /// `groups`: the parameters of each group. `state_names`: state tensors with the shard's sizes.
  /// `counts_steps`: whether the state has a counter "step". Throws Error for a parameter in two
  /// groups, a null pointer, or no parameters. Tied parameters of one group count once.
  SlotOptimizer(std::vector<std::vector<nn::SlotPtr>> groups, std::vector<std::string> state_names,
                bool counts_steps);

  /// Writes the new values into the batch's parameters and states. All tensors are plain and
  /// local. Their dtype is the dtype of the update: fp32 or fp64. A complex tensor is passed as
  /// at::view_as_real(tensor).
  /// Gradients are already multiplied by the factor of step(), unless takes_gradient_factor() is
  /// true; gradients may be overwritten.
  ///
  /// Must not communicate: ranks call update_batch() unequally often. If update_batch() throws,
  /// step() throws on this rank only, and earlier batches remain updated.
  virtual void update_batch(const Batch& batch, std::size_t group);
  /// Whether update_batch() multiplies the gradients of `batch` by Batch::gradient_factor. By
  /// default the gradients are multiplied before update_batch(), in place.
  virtual bool takes_gradient_factor(const Batch& /*batch*/, std::size_t /*group*/) const {
    return false;
  }

 private:
  friend class Muon;

  /// Whether shards that are adjacent in memory may form one tensor of a batch.
  virtual bool joins_shards(std::size_t /*group*/) const { return true; }
  /// Updates all shards of a step, by default with update_batch(). Override update_shards() in an
  /// optimizer of whole tensors, such as Muon. If update_shards() communicates, step() is
  /// collective.
  virtual void update_shards(const std::vector<ShardUpdate>& shards, const GradientFactor& factor);
  /// Multiplies the gradients of the shards in place by a 0-d tensor on a device.
  static void scale_gradients(const std::vector<ShardUpdate>& shards, const at::Tensor& factor);
  /// Whether a step includes `parameter` even without a gradient, for collective updates (Muon).
  virtual bool updates_without_gradient(const at::Tensor& /*parameter*/) const { return false; }
  /// Returns the dtype of the state for a local shard of `group`. Default: the shard's dtype, at
  /// least fp32.
  virtual c10::ScalarType state_dtype(std::size_t group, c10::ScalarType parameter) const;

  /// The optimizer state of one local shard.
  struct State {
    std::vector<at::Tensor> tensors;  ///< state tensors of the shard, one for each state name
    /// The step counter: 0-d fp32, on the shard's device; undefined if steps are not counted.
    at::Tensor step;
    /// A hash of the counter's last value on the CPU and of the later calls of step(). Equal hashes
    /// show equal counters without a copy from the device.
    std::uint64_t history = 0;
    std::uint32_t writes = 0;  ///< number of writes to `step` when `history` was set
  };
  /// Returns the state of a parameter. An earlier step must have updated the parameter.
  State& state_of(std::size_t parameter) { return states_[parameter]; }
  const State& state_of(std::size_t parameter) const { return states_[parameter]; }
  std::size_t group_of(std::size_t parameter) const { return group_of_[parameter]; }

  /// Shards that are adjacent in memory and form one tensor of a batch.
  using Run = std::span<const ShardUpdate>;

  void update(const GradientFactor& given) final;
  /// Throws Error for invalid learning rates. Called before step() changes anything.
  virtual void check_rates() const {}
  std::vector<ShardUpdate> begin_step();
  void check_parameter(std::size_t index) const;
  void make_states(const std::vector<std::size_t>& indices);
  void read_counters();
  void note_counters();

  void update_group(Run shards, std::size_t group, const GradientFactor& factor);
  void update_multiplied(Batch& batch, std::size_t group, const GradientFactor& factor);
  void count_step(Run shards, const GradientFactor& factor);
  bool adjoin_in_memory(const ShardUpdate& before, const ShardUpdate& shard) const;
  std::vector<Run> runs_of(const std::vector<ShardUpdate>& shards) const;
  void add(Batch& batch, Run run) const;
  void update_rounded(Run run, std::size_t group, const GradientFactor& factor);

  std::vector<nn::SlotPtr> parameters_;
  std::vector<std::size_t> group_of_;
  std::vector<State> states_;
  std::uint64_t calls_ = 0;
  std::vector<std::string> state_names_;
  bool counts_steps_;
};

/// The deprecated former name of SlotOptimizer.
using BatchedOptimizer
    [[deprecated("leave it out: GroupedOptimizer<Options> updates in batches")]] = SlotOptimizer;

/// SlotOptimizer with options for each group; Options needs a member `lr`. Example (compiled in
/// tests/optim/optimizer_test.cpp):
///
///   struct SignSgdOptions { double lr = 1e-3; };
///
///   class SignSgd final : public optim::GroupedOptimizer<SignSgdOptions> {
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
///
/// The second template parameter has no effect; source code for version 0.2 may pass it.
template <class Options, class = void>
class GroupedOptimizer : public SlotOptimizer {
 public:
  std::size_t groups() const { return options_.size(); }
  /// The options of a parameter group. The program can change these options between steps. A step
  /// throws Error for an lr that is negative, NaN or infinite.
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
      : SlotOptimizer(slots_of_groups(groups), std::move(state_names), counts_steps) {
    for (Group<Options>& group : groups) {
      options_.push_back(std::move(group.options));
    }
  }

 private:
  void check_group(std::size_t group) const {
    TESSERA_CHECK(group < groups(), "group ", group, " of an optimizer with ", groups(),
                  " parameter groups was requested; groups are numbered from 0");
  }
  void check_rates() const final {
    for (std::size_t group = 0; group < groups(); ++group) {
      TESSERA_CHECK(lr(group) >= 0 && std::isfinite(lr(group)), "a learning rate of ", lr(group),
                    " is invalid, in group ", group,
                    " of an optimizer; lr and the factor for lr must be finite and not negative");
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
