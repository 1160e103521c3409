// libtorch's kernels, called past its dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/stack.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/ctc_loss_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/kron_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/matmul_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/max_pool1d_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/nanquantile_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/one_hot_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/quantile_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/reshape_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/tensor_split_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/value_selecting_reduction_backward_compositeimplicitautograd_dispatch.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// libtorch's compositions of operators, called directly. For some operators the library registers a
// kernel that then calls libtorch's composition. at:: has only the call that dispatches, and would
// call that kernel again.
//
// A new version may write a composition differently. The tests of operators find reads of memory,
// or plain tensors, inside one; this canary sees only that each exists and is still a composition.
//
// Canary: CompositeKernelsCanary.

namespace composite = at::compositeimplicitautograd;

// Products of matrices on a CPU, called past the dispatcher: libtorch's own, and oneDNN's in fp32,
// which libtorch uses only if the user allows fp32 in fewer bits. The public operators of oneDNN
// (mkldnn::_linear_pointwise) neither add to a result nor write to a given one. The function that
// libtorch uses is exported, but in no header.
//
// No version differs.
//
// Canary: CpuProductsCanary.

namespace libtorch_cpu = at::cpu;

/// Whether this libtorch has oneDNN and the user has not disabled it (torch.backends.mkldnn).
bool has_onednn();

/// result = beta * result + alpha * a b, of fp32 matrices. `a` and `b` are contiguous or the
/// transpose of a contiguous matrix; `result` is contiguous and shares memory with neither.
void onednn_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& result, float beta,
                    float alpha);

// Turns a call on a stack back into one with typed results, in kernels that take both. libtorch's
// KernelFunction makes such calls itself, of kernels that are registered boxed, and does not export
// the conversion.
//
// No version differs.
//
// Canary: UnboxedCallCanary.

/// The results that an operator of this type has left on the stack.
template <class Result>
Result take_result(torch::jit::Stack& stack) {
  return c10::impl::PopResult<Result>::call(stack);
}

// An autograd kernel for an operator without a gradient: a backward through it throws; tensors that
// need no gradient pass. In Python an operator without a formula gets this kernel. In C++ it is a
// function that libtorch exports without documentation.
//
// No version differs.
//
// Canary: RefusedGradientCanary.

torch::CppFunction refuse_gradient();

// Sizes and strides as libtorch's operators compute them: of a convolution and of a view; and a
// meta tensor of given strides, without a dispatch. Only the operators are public, and they need a
// tensor on a device with a kernel.
//
// No version differs.
//
// Canary: ShapesByLibtorchCanary.

struct Convolution {
  std::vector<std::int64_t> stride, padding, dilation;
  bool transposed = false;
  std::vector<std::int64_t> output_padding = {};
  std::int64_t groups = 1;
};

/// The sizes of the result.
std::vector<std::int64_t> convolution_sizes(c10::IntArrayRef input, c10::IntArrayRef weight,
                                            const Convolution& of);

/// The strides of a view with these sizes; nullopt if the view needs a copy.
std::optional<std::vector<std::int64_t>> strides_of_view(const at::Tensor& tensor,
                                                         c10::IntArrayRef sizes);

/// On the meta device. No operator runs: no mode or key of the thread sees it.
at::Tensor meta_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

}  // namespace tessera::detail
TESSERA_API_END
