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

/// Compares data that must be equal on the ranks of a plan's mesh. Before the first forward,
/// compares the replicated parameters, and checks that the shards of each parameter are shards of
/// one tensor. In the first forward with gradients, compares the plain inputs of the root module.
/// With TESSERA_DEBUG=1, also compares the replicated parameters before each forward, their
/// gradients after each backward, and every plain tensor that an operator combines with a
/// distributed tensor.
///
/// The hooks of modules with a parallel style own the ReplicaCheck.
class ReplicaCheck : public std::enable_shared_from_this<ReplicaCheck> {
 public:
  ReplicaCheck(nn::ModuleBase& root, DeviceMesh mesh);

  /// Adds a module with a parallel style. The first call of any added module starts the comparison,
  /// because a program can call a submodule instead of the root. Returns false if the module was
  /// already added.
  bool add(nn::ModuleBase& module, const std::string& fqn);
  /// Adds hooks that compare the root module's plain inputs between ranks. An input that a style of
  /// the root module distributes is not compared, because the style's hook runs before these hooks.
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

/// All-gathers `shard`, which is on a 1-D mesh. Collective. Only the shard is saved for backward,
/// which gathers the shard again (Korthikanti et al. 2022, section 4.2.2). One all-gather serves
/// all matrix products of regathered_product(). The reduce-scatter of the input's gradient runs
/// while the gradients of the weights are computed.
at::Tensor gather_again_in_backward(const DistributedTensor& shard);

/// Returns the function that computes the matrix product of `linear`, whose weight is sharded over
/// the output features. If gather_again_in_backward() made the input, only the weight is saved for
/// backward. Otherwise the function calls aten::linear, or the fp8 product after convert_to_fp8.
/// Backward throws Error under create_graph.
nn::detail::LinearProduct regathered_product(const nn::Linear& linear);

/// Makes an nn::Linear use regathered_product() if `regather` is true. Does nothing for other
/// modules.
void set_regathered_product(nn::ModuleBase& module, bool regather);

}  // namespace tessera::tensor_parallel
