#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/dtensor/detail/local_history.h"
#include "tessera/dtensor/detail/met_pieces.h"
#include "tessera/dtensor/detail/part_reads.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::tensor_parallel {

/// What one call of parallelize_module says of a plain tensor below its root: it is the same on
/// every rank of the mesh, or this rank's part. A style takes a plain tensor for one of the two;
/// autograd's graph tells whether what it was computed from is of the same kind. Parameters that
/// the plan does not cover are taken to be equal, as those that it replicates are: the ranks
/// compare their values once, before the first forward; with TESSERA_DEBUG=1 again at each forward,
/// and their gradients after each backward.
///
/// Attached to the modules that have a style.
class Region : public std::enable_shared_from_this<Region> {
 public:
  Region(nn::ModuleBase& root, DeviceMesh mesh);

  /// Has the hooks of `module`, which has a style, ask this region.
  /// `is_left_plain`: the style says that what the module hands out is the same on every rank.
  void add(nn::ModuleBase& module, const std::string& fqn, bool is_left_plain);
  /// Adds the hooks to the root that compare.
  void watch_root(nn::ModuleBase& root);

  /// `tensor`, a plain one, is about to be taken by `module` for one with `placement`. Throws Error
  /// where that can't be: for a part, if a plain parameter took part in it, or a
  /// local tensor that was handed out as replicated, since their gradients would be of one part
  /// only, or if it was computed from pieces of a part together, or along what is split; for a
  /// replicated one, if it was
  /// computed from a part. With TESSERA_DEBUG=1 also, on all ranks, if the values of a replicated
  /// one differ; then collective.
  void check(const nn::ModuleBase& module, const at::Tensor& tensor, const Placement& placement);
  /// Throws Error if `output`, a plain one of the root's forward, was computed from a part and a
  /// plain parameter together, or along what is split: no style takes it, so that check() has not
  /// seen it. Also if it is a part, and the root's call is the outermost and has no style of its
  /// own. Looked at once for what one code computes.
  void check_output(const nn::ModuleBase& root, const at::Tensor& output);
  /// For messages: "'layers.0.o_proj'".
  std::string name_of(const nn::ModuleBase& module) const;

 private:
  void check_part(const nn::ModuleBase& module, const at::Tensor& tensor,
                  const Placement& placement);
  void check_replicated(const nn::ModuleBase& module, const at::Tensor& tensor);
  void check_covered(const at::Tensor& output, const std::vector<at::Tensor>& leaves) const;
  /// Says once that without gradients nothing is looked at.
  void warn_unseen(const nn::ModuleBase& module);
  [[noreturn]] void fail_uncovered(const nn::ModuleBase& module, const Placement& placement,
                                   const std::string& parameter) const;
  [[noreturn]] void fail_met(const nn::ModuleBase& module, const Placement& placement,
                             const tessera::detail::MetPieces& met) const;
  [[noreturn]] void fail_read(const std::string& begin,
                              const tessera::detail::PartRead& read) const;
  /// The FQN of the parameter of which forward uses `leaf`; empty if it is none below the root.
  std::string parameter_of(const at::Tensor& leaf) const;

  /// Whether the ranks of the mesh have copies of a parameter.
  bool has_copies(const nn::ParameterSlot& slot) const;
  std::vector<tessera::detail::Replica> copies(bool gradients) const;
  void compare_once();
  void compare_values(tessera::detail::Equality equality) const;
  void compare_gradients() const;
  void compare_after_backward(nn::TensorList outputs);

  DeviceMesh mesh_;
  bool debug_;
  nn::NamedSlots parameters_;  ///< all below the root
  std::unordered_map<const nn::ModuleBase*, std::string> names_;
  std::set<const nn::ModuleBase*> styled_;            ///< with a style that says what they hand out
  tessera::detail::LocalHistory parts_, replicated_;  ///< what is known to be in order
  /// What was computed as in an earlier step, and found to be in order. By the module's address.
  std::set<std::pair<const nn::ModuleBase*, std::uint64_t>> read_;
  bool seen_ = false;    ///< a part was looked at, with gradients
  bool warned_ = false;  ///< that none was
  bool compared_ = false;
  int backward_ = -1;  ///< autograd's number of the backward after which gradients are compared
};

}  // namespace tessera::tensor_parallel
