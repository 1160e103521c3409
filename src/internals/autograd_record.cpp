#include "tessera/internals/detail/autograd_record.h"

#include <torch/csrc/autograd/variable.h>

namespace tessera::detail {

void set_name(const at::Tensor& tensor, const std::string& name) {
  torch::autograd::impl::set_name(tensor, name);
}

bool is_trainable_leaf(const c10::TensorImpl& impl) {
  return static_cast<const torch::autograd::AutogradMeta*>(impl.autograd_meta())->requires_grad_;
}

const at::TensorBase& viewed_by(const at::TensorBase& tensor) {
  const auto* views = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (views != nullptr && views->has_bw_view()) {
    return views->get_backward_view().base_;
  }
  if (views != nullptr && views->has_fw_view()) {
    return views->get_forward_view().base_;
  }
  return tensor;
}

}  // namespace tessera::detail
