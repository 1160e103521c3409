#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/export.h"
#include "tessera/internals/detail/graph.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// A tensor that a node saves for backward. The result of an RMS norm or of silu_mul is not saved:
/// the node that made it saves its inputs anyway, and recomputes the result in backward, once for
/// all nodes that need it (as Korthikanti et al. 2022 do for the cheap parts of attention). Any
/// other tensor is itself saved, as by autograd. Results that were written to and results of
/// operators that redistributed their inputs are saved themselves too, and so are all tensors while
/// saved-tensor hooks are active (activation checkpointing).
///
/// Recomputed values are bit-equal. In a recorded backward (create_graph) autograd records the
/// operator again.
class KeptTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor);
  /// Returns the tensor, recomputed if necessary. Throws libtorch's errors if the tensor, or an
  /// input of its recomputation, was written to or released. `gradient`: the gradient of the
  /// tensor, which is used if takes_gradient() is true; undefined if the gradient is not known yet.
  at::Tensor unpack(const at::Tensor& gradient = {}) const;
  /// Whether unpack() can compute the tensor together with the backward of its own operator for
  /// `gradient`; both read the same inputs, so they are then read once instead of twice.
  bool takes_gradient() const;
  /// Releases the saved tensor. To be called when no further backward will run the node that saved
  /// the tensor.
  void release() { saved_.reset_data(); }

 private:
  NodePtr<Node> maker_;  ///< the node that recomputes the tensor; nullptr: the tensor itself is
                         ///< saved
  SavedVariable saved_;
};

}  // namespace tessera::detail
TESSERA_API_END
