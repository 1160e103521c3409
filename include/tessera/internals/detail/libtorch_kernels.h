// Calls libtorch's kernels directly, without its dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/stack.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/max_pool1d_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/one_hot_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/reshape_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/tensor_split_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/value_selecting_reduction_backward_compositeimplicitautograd_dispatch.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// libtorch's composite operators, called directly. For some operators the library registers a
// kernel that then calls libtorch's composite implementation. The functions in at:: dispatch, and
// would call the library's kernel again.
//
// A new libtorch version may implement a composite operator differently. The tests of operators
// find composite operators that read memory or make plain tensors; the canary only checks that each
// operator exists and is still composite.
//
// Canary: CompositeKernelsCanary.

namespace composite = at::compositeimplicitautograd;

// Matrix products on a CPU, called without the dispatcher: libtorch's own, and oneDNN's in fp32,
// which libtorch uses only if the user allows reduced precision for fp32. The public operators of
// oneDNN (mkldnn::_linear_pointwise) neither add to a result nor write to a given one. The function
// that libtorch uses is exported, but declared in no header.
//
// Canary: CpuProductsCanary.

namespace libtorch_cpu = at::cpu;

/// Whether this libtorch has oneDNN and the user has not disabled it (torch.backends.mkldnn).
bool has_onednn();

/// result = beta * result + alpha * a b, of fp32 matrices. `a` and `b` are contiguous or the
/// transpose of a contiguous matrix; `result` is contiguous and shares memory with neither.
void onednn_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, float beta,
                    float alpha);

// Converts a call on a stack back into a call with typed results, for kernels that support both.
// libtorch's KernelFunction does the same for kernels that are registered boxed, and does not
// export the conversion.
//
// Canary: UnboxedCallCanary.

/// Takes the results of type `Result` that an operator has left on the stack.
template <class Result>
Result take_result(torch::jit::Stack& stack) {
  return c10::impl::PopResult<Result>::call(stack);
}

// An autograd kernel for an operator without a gradient: a backward through the operator throws; a
// forward on tensors that need no gradient works. In Python an operator without a gradient formula
// gets this kernel. In C++ the kernel is a function that libtorch exports without documentation.
//
// Canary: RefusedGradientCanary.

torch::CppFunction refuse_gradient();

// Sizes and strides as libtorch's operators compute them, of a convolution and of a view; and a
// meta tensor of given strides, made without dispatching. Only the operators are public, and they
// need a tensor on a device with a kernel.
//
// Canary: ShapesByLibtorchCanary.

struct Convolution {
  std::vector<std::int64_t> stride, padding, dilation;
  bool transposed = false;
  std::vector<std::int64_t> output_padding = {};
  std::int64_t groups = 1;
};

/// The sizes of the result of a convolution.
std::vector<std::int64_t> convolution_sizes(c10::IntArrayRef input, c10::IntArrayRef weight,
                                            const Convolution& of);

/// The strides of a view with the given sizes; nullopt if a view is not possible and a copy is
/// needed.
std::optional<std::vector<std::int64_t>> strides_of_view(const at::Tensor& tensor,
                                                         c10::IntArrayRef sizes);

/// A tensor on the meta device, made without an operator, so that no mode or key of the thread sees
/// it.
at::Tensor meta_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

}  // namespace tessera::detail
TESSERA_API_END
