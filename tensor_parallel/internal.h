#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {

/// Returns the FQN in quotes, for messages: "'layers.0.q_proj'". Returns "the root module" for "".
std::string quoted(const std::string& fqn);

bool is_distinct_on(const nn::ParameterSlot& slot, const DeviceMesh& mesh);

/// Compares data that must be equal on the ranks of a mesh. Compares the parameters before the
/// first forward. Compares the root module's plain inputs in the first forward with gradients. With
/// TESSERA_DEBUG=1, compares parameters, gradients and plain tensors in every step.
///
/// The hooks of modules with a parallel style own the ReplicaCheck.
class ReplicaCheck : public std::enable_shared_from_this<ReplicaCheck> {
 public:
  ReplicaCheck(nn::ModuleBase& root, DeviceMesh mesh);

  /// Adds a module with a parallel style. Returns false if the module was already added. The
  /// first call of any added module starts the comparison of the parameters, because programs can
  /// call a submodule instead of the root.
  bool add(nn::ModuleBase& module, const std::string& fqn);
  /// Adds hooks that compare the root module's plain inputs between ranks. The hook of the root's
  /// own style runs first, so inputs that the style distributes are not compared.
  void watch_root(nn::ModuleBase& root);

  /// With TESSERA_DEBUG=1, compares `tensor`, a plain input of `module`. Throws Error, on all
  /// ranks, if the values differ between ranks. Collective with TESSERA_DEBUG=1.
  void check_input(const nn::ModuleBase& module, const at::Tensor& tensor) const;
  /// Returns the module's FQN for messages: "'layers.0.o_proj'".
  std::string name_of(const nn::ModuleBase& module) const;

 private:
  bool is_replicated(const nn::ParameterSlot& slot) const;
  std::vector<tessera::detail::Replica> replicas(bool gradients) const;
  /// Compares the parameters and `inputs` between ranks. `inputs`: the root module's inputs; empty
  /// if the program called another module.
  void compare_before_forward(nn::TensorList inputs);
  void compare_origins() const;
  void compare(const std::vector<tessera::detail::Replica>& replicas,
               tessera::detail::Equality equality, const std::string& remedy) const;
  void compare_after_backward(nn::TensorList outputs);

  DeviceMesh mesh_;
  bool debug_;
  nn::NamedSlots parameters_;  ///< parameters of the root and its submodules
  std::unordered_map<const nn::ModuleBase*, std::string> names_;
  bool compared_ = false;         ///< whether ranks have compared the parameters
  bool compared_inputs_ = false;  ///< whether ranks have compared the root module's inputs
};

/// All-gathers `shard` (on a 1-D mesh) for the matrix products of regathered_product(). Collective.
/// Backward gathers the shard again (Korthikanti et al. 2022, section 4.2.2), instead of saving the
/// gathered tensor.
at::Tensor gather_again_in_backward(const DistributedTensor& shard);

/// Returns the function that computes the matrix product of `linear`, whose weight is sharded over
/// the output features. If gather_again_in_backward() made the input, only the weight is saved for
/// backward. Backward throws Error under create_graph.
nn::detail::LinearProduct regathered_product(const nn::Linear& linear);

/// Makes an nn::Linear use regathered_product() if `regather` is true. Does nothing for other
/// modules.
void set_regathered_product(nn::ModuleBase& module, bool regather);

}  // namespace tessera::tensor_parallel
