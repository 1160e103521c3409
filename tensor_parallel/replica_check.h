#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::tensor_parallel {

/// Compares what must be equal on the ranks of a plan's mesh. Before the first forward: the
/// parameters that the plan replicates, the origins of those that it splits, and in the first
/// forward with gradients the plain inputs of the root. With TESSERA_DEBUG=1 also the replicated
/// parameters before each forward, their gradients after each backward, and every plain tensor that
/// an operator combines with a distributed one.
///
/// Attached to the modules that have a style.
class ReplicaCheck : public std::enable_shared_from_this<ReplicaCheck> {
 public:
  ReplicaCheck(nn::ModuleBase& root, DeviceMesh mesh);

  /// The first call of `module` starts the comparison, since it need not come through the root.
  /// Returns false if the module was added before.
  bool add(nn::ModuleBase& module, const std::string& fqn);
  /// Adds the hooks of the root. They run after the hooks of its styles: an input that a style
  /// takes for a shard may differ.
  void watch_root(nn::ModuleBase& root);

  /// With TESSERA_DEBUG=1: compares `tensor`, a plain input of `module`. Throws Error, on all
  /// ranks, if its values differ. Collective then.
  void check_input(const nn::ModuleBase& module, const at::Tensor& tensor) const;
  /// For messages: "'layers.0.o_proj'".
  std::string name_of(const nn::ModuleBase& module) const;

 private:
  bool is_replicated(const nn::ParameterSlot& slot) const;
  std::vector<tessera::detail::Replica> replicas(bool gradients) const;
  /// `inputs`: of the root; empty before the call of another module.
  void compare_before_forward(nn::TensorList inputs);
  void compare_origins() const;
  void compare(const std::vector<tessera::detail::Replica>& replicas,
               tessera::detail::Equality equality, const std::string& remedy) const;
  void compare_after_backward(nn::TensorList outputs);

  DeviceMesh mesh_;
  bool debug_;
  nn::NamedSlots parameters_;  ///< all below the root
  std::unordered_map<const nn::ModuleBase*, std::string> names_;
  bool compared_ = false;         ///< the parameters
  bool compared_inputs_ = false;  ///< those of the root
};

}  // namespace tessera::tensor_parallel
