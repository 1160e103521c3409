#include "tessera/internals/detail/guarded_view.h"

#include <torch/csrc/autograd/VariableTypeUtils.h>

namespace tessera::detail {

at::Tensor guarded_view(const at::Tensor& tensor) {
  return torch::autograd::as_view(tensor, tensor.tensor_data(), /*is_bw_differentiable=*/true,
                                  /*is_fw_differentiable=*/true, /*view_func=*/nullptr,
                                  /*rev_view_func=*/nullptr,
                                  torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
}

}  // namespace tessera::detail
