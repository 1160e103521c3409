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

/// Compares data that must be equal on the ranks of a tensor-parallel plan's mesh. Before the first
/// forward: the parameters that the plan replicates, and the origins of the parameters that it
/// splits. In the first forward with gradients: the plain inputs of the root. With TESSERA_DEBUG=1
/// also: the replicated parameters before each forward, their gradients after each backward, and
/// every plain tensor that an operator combines with a distributed one.
///
/// A ReplicaCheck is attached to the modules that have a style.
class ReplicaCheck : public std::enable_shared_from_this<ReplicaCheck> {
 public:
  ReplicaCheck(nn::ModuleBase& root, DeviceMesh mesh);

  /// Adds a module with a style. The first call of any such module starts the comparison, since a
  /// program may call a module without calling the root. Returns false if the module was already
  /// added.
  bool add(nn::ModuleBase& module, const std::string& fqn);
  /// Adds the hooks that compare the inputs of the root. They run after the hooks of the root's
  /// styles, because an input that a style interprets as a shard may differ between ranks.
  void watch_root(nn::ModuleBase& root);

  /// With TESSERA_DEBUG=1, compares `tensor`, a plain input of `module`. Throws Error, on all
  /// ranks, if the values differ between ranks. Collective with TESSERA_DEBUG=1.
  void check_input(const nn::ModuleBase& module, const at::Tensor& tensor) const;
  /// The module's FQN for messages: "'layers.0.o_proj'".
  std::string name_of(const nn::ModuleBase& module) const;

 private:
  bool is_replicated(const nn::ParameterSlot& slot) const;
  std::vector<tessera::detail::Replica> replicas(bool gradients) const;
  /// Compares parameters, and `inputs` if the root is called: the arguments of the root. `inputs`
  /// is empty if another module is called.
  void compare_before_forward(nn::TensorList inputs);
  void compare_origins() const;
  void compare(const std::vector<tessera::detail::Replica>& replicas,
               tessera::detail::Equality equality, const std::string& remedy) const;
  void compare_after_backward(nn::TensorList outputs);

  DeviceMesh mesh_;
  bool debug_;
  nn::NamedSlots parameters_;  ///< all parameters below the root
  std::unordered_map<const nn::ModuleBase*, std::string> names_;
  bool compared_ = false;         ///< whether the parameters have been compared
  bool compared_inputs_ = false;  ///< whether the root's inputs have been compared
};

}  // namespace tessera::tensor_parallel
