#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "context.h"
#include "parameter_group.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// What fully_shard made of one module, or of several that run one after another: their parameters,
/// minus those of units below, and the hooks that gather and reduce them.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  /// What may be changed between iterations.
  struct Settings {
    std::optional<bool> reshard_after_forward;  ///< default: not for the root
    bool reshard_after_backward = true;
    bool gradient_sync = true;
    bool unshard_in_backward = true;
    bool unshard_async_op = false;
    bool last_backward = true;
    bool all_reduce = true;
    /// What the next forward's gathers wait for; default: all that was issued.
    std::optional<comm::StreamEventPtr> post_optim_event;
    std::vector<std::weak_ptr<Unit>> forward_prefetch;
    std::vector<std::weak_ptr<Unit>> backward_prefetch;  ///< empty: what ran before
  };

  /// Shards the parameters, which were checked. Not collective.
  Unit(std::vector<nn::ModuleBase*> modules, const nn::NamedSlots& parameters, const DataMesh& mesh,
       const Options& options);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  ~Unit();
  /// Adds the hooks to the modules, which keep this alive.
  void install();

  Settings& settings() { return settings_; }
  CollectiveHooks& collective_hooks() { return *hooks_; }
  void set_gradient_divisor(double divisor);
  void set_all_reduce(bool all_reduce);
  void set_force_sum(bool force);
  void set_unshard_async_op(bool async_op);
  /// Whether a root is known, and is another.
  bool is_below_root() const { return context_ != nullptr && !is_root_; }
  /// What messages call this: by its FQN, once a root is known; before, by its class.
  const std::string& label() const { return label_; }
  void set_label(std::string label);

  Communication& communication();
  void set_communication(CommunicationPtr communication);
  const CommunicationPtr& shared_communication();

  bool unsharded() const;
  /// Gathers from now on read shards as the compute lane leaves them: for those outside of a root's
  /// forward, which waits for the update itself.
  void await_compute();
  /// See ParameterGroup; of all groups.
  void start_unshard();
  void unshard();
  void reshard();
  /// The same within a step; see ParameterGroup::reshard_for_now.
  void reshard_within_step();
  /// Whether the settings say that more micro-batches of the step will come.
  bool step_goes_on() const;
  /// A micro-batch has ended: after the last one of the step, forgets the pieces that were kept.
  void end_micro_batch();
  std::vector<ParameterGroup>& groups() { return groups_; }

  /// An earlier iteration never came to its backward: frees what it left.
  void abandon_iteration();
  /// The root's forward begins.
  void begin_iteration();
  /// Around a call of a module's method that uses its parameters.
  void pre_forward(nn::TensorList inputs);
  void post_forward(nn::ModuleBase& module, nn::TensorList outputs);

  /// The root's forward has ended: warns of modules of this unit that did not run, and ends its
  /// forward.
  void end_partial_forward();

  /// Forgets what a parameter of this unit has accumulated and not reduced.
  void drop_kept_gradient(const nn::ParameterSlot& slot);
  /// Forgets the reductions that a failed backward left behind.
  void forget_reductions();
  /// Backward has ended: reduces what is left and frees what is still gathered.
  void end_backward();

 private:
  void pre_backward();
  void post_backward(nn::TensorList gradients);

  void enter_as_root();
  void make_context();
  void prepare();
  void begin_forward(nn::TensorList inputs);
  void end_forward();
  void await_backward(nn::TensorList outputs);
  void prefetch_for_backward();
  void settle_gradients();

  std::vector<nn::ModuleBase*> modules_;
  DataMesh mesh_;
  std::string label_;
  std::shared_ptr<CollectiveHooks> hooks_ = std::make_shared<CollectiveHooks>();
  CommunicationPtr communication_;
  MixedPrecisionPolicy mp_policy_;
  bool may_be_unused_;
  Settings settings_;
  std::vector<ParameterGroup> groups_;
  std::shared_ptr<Context> context_;
  bool is_root_ = false;
  bool prepared_ = false;
  std::optional<c10::ScalarType> restored_dtype_;  ///< of the results of the call under way

  /// Modules of this unit that the forward under way has not run yet.
  std::unordered_set<const nn::ModuleBase*> to_run_;
  bool warned_ = false;
  bool backward_comes_ = false;
  /// Backward has come to this unit and not yet passed it.
  bool in_backward_ = false;
};

/// Makes a unit of modules that are none yet.
void make_unit(const std::vector<nn::ModuleBase*>& modules, const nn::NamedSlots& parameters,
               const DataMesh& mesh, const Options& options);

/// The units of `module` and, if `recurse`, of the modules below it, each once, in the order of
/// registration.
std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse);

}  // namespace tessera::fsdp
