#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/export.h"
#include "tessera/internals/detail/graph.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// A tensor that a node saves for backward. The result of an RMS norm or of silu_mul is not saved:
/// the node that made it saves its inputs anyway, and recomputes the result in backward, once for
/// all nodes that need it (as Korthikanti et al. 2022 do for the cheap parts of attention). Any
/// other tensor is saved as autograd does. So are results that were written to, results of
/// operators that redistributed their inputs, and all tensors while saved-tensor hooks are active
/// (activation checkpointing).
///
/// Recomputed values are equal to the bit. In a recorded backward (create_graph) autograd records
/// the operator again.
class KeptTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor);
  /// Throws libtorch's errors if the tensor, or an input from which it is recomputed, was written
  /// to or released.
  /// `gradient`: of the tensor, where takes_gradient(); undefined: it is not known yet.
  at::Tensor unpack(const at::Tensor& gradient = {}) const;
  /// Whether the tensor is computed together with what its own backward gives for `gradient`, which
  /// reads the same once instead of twice.
  bool takes_gradient() const;
  /// No further backward runs the node that saved it.
  void release() { saved_.reset_data(); }

 private:
  NodePtr<Node> maker_;  ///< computes the tensor again; nullptr: it is kept
  SavedVariable saved_;
};

}  // namespace tessera::detail
TESSERA_API_END
