// What autograd has on record of a tensor: its name, whether it is a leaf that is trained, and of
// which tensor it is a view. Tensor::name() only reads; is_leaf() and requires_grad() together cost
// two virtual calls, at every first use; and _base() is of the views that have a derivative alone.
//
// No version differs.
//
// Canary: AutogradRecordCanary.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// As Tensor::name() tells then.
void set_name(const at::Tensor& tensor, const std::string& name);

/// `impl` has autograd's state. True for a leaf alone: other tensors require a gradient by their
/// node.
bool is_trainable_leaf(const c10::TensorImpl& impl);

/// The tensor that `tensor` is a view of, however indirectly, or itself.
const at::TensorBase& viewed_by(const at::TensorBase& tensor);

}  // namespace tessera::detail
TESSERA_API_END
