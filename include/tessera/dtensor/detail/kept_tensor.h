#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/export.h"
#include "tessera/internals/detail/graph.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// What a node keeps of an input for backward. The result of an RMS norm or of silu_mul is not
/// kept: the node that made it keeps what it is made of anyway, and computes it again in backward,
/// once for all nodes that need it (Korthikanti et al. 2022 do so with the cheap parts of
/// attention). Any other tensor is kept as autograd does; so is a result that was written to, one
/// whose operator moved its inputs, and each where hooks take what is kept (activation
/// checkpointing).
///
/// Recomputed values are equal to the bit. In a recorded backward (create_graph) autograd records
/// the operator again.
class KeptTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor);
  /// Throws libtorch's errors for a tensor that was written to, or released; where it is computed
  /// again, for what it is made of.
  /// `gradient`: of the tensor, where takes_gradient(); undefined: it is not known yet.
  at::Tensor unpack(const at::Tensor& gradient = {}) const;
  /// Whether the tensor is computed together with what its own backward gives for `gradient`, which
  /// reads the same once instead of twice.
  bool takes_gradient() const;
  /// No further backward goes through the node that keeps it.
  void release() { saved_.reset_data(); }

 private:
  NodePtr<Node> maker_;  ///< computes the tensor again; nullptr: it is kept
  SavedVariable saved_;
};

}  // namespace tessera::detail
TESSERA_API_END
