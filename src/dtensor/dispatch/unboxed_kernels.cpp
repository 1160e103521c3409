// Kernels with unboxed arguments for the operators that a training step calls most. Such a kernel
// only saves about a microsecond per call, and costs compile time.

#include "dispatch/unboxed_kernel.h"

#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/split_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/stack_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>

#include "tessera/internals/detail/dispatch_keys.h"
#include "views/views.h"

namespace tessera::detail {

namespace {

/// _unsafe_view of a local tensor; copies a local tensor that cannot be viewed with these sizes.
struct UnsafeViewOfPart : at::_ops::_unsafe_view {
  static at::Tensor call(const at::Tensor& part, c10::SymIntArrayRef sizes) {
    return at::_ops::_unsafe_view::call(viewable(part, C10_AS_INTARRAYREF_SLOW(sizes)), sizes);
  }
  static at::Tensor redispatch(c10::DispatchKeySet keys, const at::Tensor& part,
                               c10::SymIntArrayRef sizes) {
    return at::_ops::_unsafe_view::redispatch(keys, viewable(part, C10_AS_INTARRAYREF_SLOW(sizes)),
                                              sizes);
  }
};

template <class... Ops>
void implement(torch::Library& library) {
  (UnboxedKernel<Ops>::implement(library), ...);
}

TORCH_LIBRARY_IMPL(aten, TESSERA_DISTRIBUTED_KEY, library) {
  using namespace at::_ops;  // NOLINT(google-build-using-namespace): a list of its operators
  implement<add_Tensor, add__Tensor, add_Scalar, mul_Scalar, div_Scalar, sub_Tensor, mul_Tensor,
            mul__Tensor, div_Tensor, div__Tensor, neg, silu, silu_backward, rsqrt,
            pow_Tensor_Scalar>(library);
  implement<mm, bmm, addmm, embedding, _scaled_dot_product_flash_attention_for_cpu,
            _scaled_dot_product_flash_attention_for_cpu_backward>(library);
  implement<sum_dim_IntList, mean_dim, _softmax, _log_softmax, _log_softmax_backward_data>(library);
  implement<view, UnsafeViewOfPart, t, transpose_int, permute, expand, unsqueeze, squeeze_dim,
            select_int, slice_Tensor, split_Tensor, cat, at::_ops::stack, at::_ops::clone>(library);
}

}  // namespace
}  // namespace tessera::detail
