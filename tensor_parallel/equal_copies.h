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

/// Compares what must be equal on the ranks of a plan's mesh: parameters that the plan replicates,
/// and plain inputs. The ranks exchange hashes between the hosts: of the parameters, and of the
/// origins of split ones, before the first forward; of the root's plain inputs in the first forward
/// with gradients. With TESSERA_DEBUG=1 they compare the parameters at each forward, their
/// gradients after each backward, and every plain tensor that meets a distributed one.
///
/// Attached to the modules that have a style.
class EqualCopies : public std::enable_shared_from_this<EqualCopies> {
 public:
  EqualCopies(nn::ModuleBase& root, DeviceMesh mesh);

  /// Makes a module with a style compare before its first call, which may not come through the
  /// root. Returns false if the module was added before.
  bool add(nn::ModuleBase& module, const std::string& fqn);
  /// Adds the comparing hooks to the root, after the hooks of its own styles. Those run first:
  /// inputs that they take for shards may differ.
  void watch_root(nn::ModuleBase& root);

  /// With TESSERA_DEBUG=1: `tensor`, a plain input of `module`, counts as the same on every rank.
  /// Throws Error, on all ranks, if its values differ. Collective then.
  void check_input(const nn::ModuleBase& module, const at::Tensor& tensor) const;
  /// For messages: "'layers.0.o_proj'".
  std::string name_of(const nn::ModuleBase& module) const;

 private:
  /// Whether the ranks of the mesh have copies of a parameter.
  bool has_copies(const nn::ParameterSlot& slot) const;
  std::vector<tessera::detail::Replica> copies(bool gradients) const;
  void compare_before_forward(nn::TensorList inputs);
  /// Compares the origins of split parameters: whether the parts are those of one tensor.
  void compare_origins() const;
  void compare(const std::vector<tessera::detail::Replica>& copies,
               tessera::detail::Equality equality, const std::string& remedy) const;
  void compare_gradients() const;
  void compare_after_backward(nn::TensorList outputs);

  DeviceMesh mesh_;
  bool debug_;
  nn::NamedSlots parameters_;  ///< all below the root
  std::unordered_map<const nn::ModuleBase*, std::string> names_;
  bool compared_ = false;         ///< the parameters
  bool compared_inputs_ = false;  ///< the root's
  int backward_ = -1;  ///< autograd's number of the backward after which gradients are compared
};

}  // namespace tessera::tensor_parallel
