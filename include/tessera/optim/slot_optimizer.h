#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

/// Parameters that share options.
template <class Options>
struct Group {
  std::vector<nn::SlotPtr> parameters;
  Options options = {};
};

/// The local shard of a parameter in a step.
struct ShardUpdate {
  std::size_t index;     ///< of the parameter
  std::size_t group;     ///< of its options
  at::Tensor parameter;  ///< local, without autograd
  at::Tensor gradient;   ///< local; undefined if there is none
};

/// Base of optimizers that keep state beside local shards. State is made at a parameter's first
/// step, in fp32 where the parameter is narrower, and for shards that lie one after another in
/// memory (as FSDP lays them out) the state does too, so that they are updated as one.
class SlotOptimizer : public Optimizer {
 public:
  const std::vector<nn::SlotPtr>& parameters() const final { return parameters_; }
  std::vector<StateTensor> state() final;

 protected:
  /// `state_names`: tensors shaped like the shard. `counts_steps`: a counter "step" too. Throws
  /// Error for a slot that is in two groups; within one, repeats (tied weights) count once.
  SlotOptimizer(std::vector<std::vector<nn::SlotPtr>> groups, std::vector<std::string> state_names,
                bool counts_steps);

  /// Updates the shards, which have passed all checks. `factor`: see step().
  virtual void update_shards(const std::vector<ShardUpdate>& shards, double factor) = 0;
  /// Whether a parameter takes part though it has no gradient.
  virtual bool updates_without_gradient(const at::Tensor& /*parameter*/) const { return false; }

  /// State `which` of a parameter that a step has met.
  const at::Tensor& state_of(std::size_t parameter, std::size_t which) const {
    return states_[parameter].tensors[which];
  }

  /// Shards that one list kernel updates: tensor i of each list belongs to tensor i of the others.
  struct Batch {
    std::vector<at::Tensor> parameters, gradients, steps;
    std::vector<std::vector<at::Tensor>> states;  ///< one list for each state name
  };
  using Kernel = std::function<void(const Batch& batch)>;
  /// Updates a group's shards by `kernel`, which gets them in the type of computation: fp32 for
  /// narrower parameters, whose new values are then rounded back, a few at a time. Gradients are
  /// multiplied by `factor`, counters counted, neighbours in memory joined.
  void for_each_batch(const std::vector<ShardUpdate>& shards, std::size_t group, double factor,
                      const Kernel& kernel);

 private:
  struct State {
    std::vector<at::Tensor> tensors;
    at::Tensor step;
    std::int64_t steps = 0;  ///< what `step` holds, known without asking the device
  };
  using Run = std::span<const ShardUpdate>;

  void update(double gradient_factor) final;
  void check_parameter(std::size_t index) const;
  void make_states(const std::vector<std::size_t>& indices);
  void read_counters();
  void count(const std::vector<ShardUpdate>& shards, std::size_t group);
  bool continues(const ShardUpdate& before, const ShardUpdate& shard) const;
  std::vector<Run> runs_of(const std::vector<ShardUpdate>& shards) const;
  void add(Batch& batch, Run run) const;
  void update_rounded(Run run, double factor, const Kernel& kernel) const;

  std::vector<nn::SlotPtr> parameters_;
  std::vector<std::size_t> group_of_;  // beside parameters_
  std::vector<State> states_;          // beside parameters_
  std::vector<std::string> state_names_;
  bool counts_steps_;
  bool counters_shown_ = false;  ///< and maybe written to
};

/// The part of an optimizer that holds each group's options, which need a member `lr`.
template <class Options>
class GroupedOptimizer : public SlotOptimizer {
 public:
  std::size_t groups() const { return options_.size(); }
  /// May be changed between steps.
  Options& options(std::size_t group = 0) { return options_.at(group); }
  const Options& options(std::size_t group = 0) const { return options_.at(group); }
  double lr(std::size_t group = 0) const { return options_.at(group).lr * lr_factor_; }
  void scale_lr(double factor) final { lr_factor_ = factor; }

 protected:
  GroupedOptimizer(std::vector<Group<Options>> groups, std::vector<std::string> state_names,
                   bool counts_steps)
      : SlotOptimizer(slots_of_groups(groups), std::move(state_names), counts_steps) {
    for (Group<Options>& group : groups) options_.push_back(std::move(group.options));
  }

 private:
  static std::vector<std::vector<nn::SlotPtr>> slots_of_groups(
      const std::vector<Group<Options>>& groups) {
    std::vector<std::vector<nn::SlotPtr>> slots;
    for (const Group<Options>& group : groups) slots.push_back(group.parameters);
    return slots;
  }

  std::vector<Options> options_;
  double lr_factor_ = 1.0;
};

}  // namespace tessera::optim
