#pragma once

#include <memory>
#include <string>
#include <vector>

#include "context.h"
#include "parameter_group.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// A module made one unit by fully_shard: its parameters, minus those of units below it, and the
/// hooks that gather and reduce them.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  /// Shards the parameters. Not collective.
  Unit(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options);
  /// Adds the hooks to the module, which keep this alive.
  void install();

  /// See ParameterGroup; of all groups.
  void start_unshard();
  void unshard();
  void reshard();

  /// The root's forward begins; `stale`: what is gathered is left from an earlier iteration.
  void begin_iteration(bool stale);
  /// Backward has ended: reduces what is left and frees what is still gathered.
  void end_backward();

 private:
  void pre_forward(nn::TensorList inputs);
  void post_forward(nn::TensorList outputs);
  void pre_backward();
  void post_backward();

  void enter_as_root();
  void await_backward(nn::TensorList outputs);

  nn::ModuleBase& module_;
  Options options_;
  std::vector<ParameterGroup> groups_;
  std::shared_ptr<Context> context_;
  bool is_root_ = false;
  bool prepared_ = false;
  /// Backward has come to this unit and not yet passed it.
  bool in_backward_ = false;
};

}  // namespace tessera::fsdp
