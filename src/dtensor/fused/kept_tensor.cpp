#include "tessera/dtensor/detail/kept_tensor.h"

#include "fused/fused_operator.h"

namespace tessera::detail {
namespace {

/// The node that can compute `tensor` again; nullptr: the tensor is to be kept.
NodePtr<Node> maker_of(const at::Tensor& tensor) {
  auto* node = dynamic_cast<RecomputableNode*>(tensor.grad_fn().get());
  const bool recomputes = node != nullptr && !hooks_keep_tensors() && node->can_recompute(tensor);
  return recomputes ? pointer_to(*node) : nullptr;
}

}  // namespace

KeptTensor::KeptTensor(const at::Tensor& tensor) : maker_(maker_of(tensor)) {
  if (maker_ == nullptr) {
    saved_ = SavedVariable(tensor, /*is_output=*/false);
  }
}

bool KeptTensor::takes_gradient() const {
  return maker_ != nullptr && static_cast<const RecomputableNode&>(*maker_).takes_gradient();
}

at::Tensor KeptTensor::unpack(const at::Tensor& gradient) const {
  return maker_ == nullptr ? saved_.unpack()
                           : static_cast<RecomputableNode&>(*maker_).recompute_for(gradient);
}

}  // namespace tessera::detail
