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

// libtorch's implementations of composite operators. Tessera's kernels for these operators call the
// implementations directly, because at:: functions would dispatch to Tessera's kernels again.
//
// The canary only checks that each operator exists and is composite. The operator tests find
// changes in a new libtorch version.
//
// Canary: CompositeKernelsCanary, a test of libtorch itself.

namespace composite = at::compositeimplicitautograd;

// Matrix products on a CPU without the dispatcher, by libtorch or by oneDNN in fp32. libtorch uses
// oneDNN in fp32 only if reduced precision is allowed. The public oneDNN operators cannot write to
// a given result. No header declares the function that libtorch exports.
//
// Canary: CpuProductsCanary, a test of libtorch itself.

namespace libtorch_cpu = at::cpu;

/// Whether libtorch has oneDNN and the user has not disabled oneDNN (torch.backends.mkldnn).
bool has_onednn();

/// Computes result = beta * result + alpha * a b in fp32. `a` and `b`: contiguous matrices or their
/// transposes. `result`: contiguous, without overlap.
void onednn_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, float beta,
                    float alpha);

// take_result() converts the stack of results of a boxed kernel to a typed result, so that a typed
// function can call the kernel. libtorch does not export this conversion.
//
// Canary: UnboxedCallCanary, a test of libtorch itself.

/// Removes the results of an operator from the stack and returns the results as type `Result`.
template <class Result>
Result take_result(torch::jit::Stack& stack) {
  return c10::impl::PopResult<Result>::call(stack);
}

// The autograd kernel of an operator without a gradient, which throws in backward. libtorch exports
// the function without documentation.
//
// Canary: RefusedGradientCanary, a test of libtorch itself.

torch::CppFunction refuse_gradient();

// Functions that compute sizes of a convolution and strides of a view as libtorch does, and make
// meta tensors without dispatching. libtorch's public operators need tensors.
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
