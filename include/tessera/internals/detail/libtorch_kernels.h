// Calls libtorch's kernels directly, without its dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/stack.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/reshape_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/tensor_split_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/value_selecting_reduction_backward_compositeimplicitautograd_dispatch.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// The namespace `composite` has libtorch's composite operators for direct calls. For some of
// the operators, Tessera registers a kernel. The kernel calls libtorch's implementation directly,
// because the functions in at:: would dispatch to Tessera's kernel again.
//
// A new libtorch version can implement a composite operator differently. The tests of operators
// find composite operators that do not work on distributed tensors; the canary test only checks
// that each operator exists and is still composite.
//
// Canary: CompositeKernelsCanary, a test of libtorch itself.

namespace composite = at::compositeimplicitautograd;

// Matrix products on a CPU without the dispatcher: those of libtorch, and those of oneDNN in fp32.
// libtorch uses oneDNN in fp32 only if the user allows reduced precision. The public oneDNN
// operators (mkldnn::_linear_pointwise) cannot write or add to a given result. The function that
// libtorch uses is exported, but declared in no header.
//
// Canary: CpuProductsCanary, a test of libtorch itself.

namespace libtorch_cpu = at::cpu;

/// Whether libtorch has oneDNN and the user has not disabled oneDNN (torch.backends.mkldnn).
bool has_onednn();

/// Computes result = beta * result + alpha * a b, for fp32 matrices. `a` and `b` are contiguous or
/// transposes of contiguous matrices; `result` is contiguous and does not overlap with `a` and `b`.
void onednn_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, float beta,
                    float alpha);

// take_result() converts the results of a boxed kernel, which are on a stack, to a typed result. So
// a typed (unboxed) function can call a boxed kernel. libtorch's KernelFunction does the same for
// kernels that are registered as boxed, but does not export the conversion.
//
// Canary: UnboxedCallCanary, a test of libtorch itself.

/// Removes the results of an operator from the stack and returns the results as type `Result`.
template <class Result>
Result take_result(torch::jit::Stack& stack) {
  return c10::impl::PopResult<Result>::call(stack);
}

// The autograd kernel of an operator without a gradient: a backward through the operator throws. In
// Python an operator without a gradient formula gets this kernel. In C++ the kernel is a function
// that libtorch exports without documentation.
//
// Canary: RefusedGradientCanary, a test of libtorch itself.

torch::CppFunction refuse_gradient();

// Functions that compute sizes of a convolution and strides of a view as libtorch's operators do,
// and make meta tensors without dispatching. libtorch's public operators do the same, but need
// tensors on a device for which the operator has a kernel.
//
// Canary: ShapesByLibtorchCanary, a test of libtorch itself.

struct Convolution {
  std::vector<std::int64_t> stride, padding, dilation;
  bool transposed = false;
  std::vector<std::int64_t> output_padding = {};
  std::int64_t groups = 1;
};

/// Returns the sizes of the result of a convolution.
std::vector<std::int64_t> convolution_sizes(c10::IntArrayRef input, c10::IntArrayRef weight,
                                            const Convolution& of);

/// Returns the strides of a view of `tensor` with the given sizes; nullopt if a view is not
/// possible.
std::optional<std::vector<std::int64_t>> strides_of_view(const at::Tensor& tensor,
                                                         c10::IntArrayRef sizes);

/// Makes a tensor on the meta device without an operator call, so that no mode or dispatch key of
/// the thread sees it.
at::Tensor meta_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

}  // namespace tessera::detail
TESSERA_API_END
