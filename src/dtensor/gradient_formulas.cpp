// Formulas of gradients that begin with a plain tensor of zeros, into which a distributed gradient
// would have to be gathered: the same with zeros that lie as the gradient does.

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <ATen/ops/value_selecting_reduction_backward_compositeimplicitautograd_dispatch.h>

#include "override_composite.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::detail {
namespace {

/// Of max.dim, sort, topk and their like: each gradient goes to the element that was selected.
at::Tensor value_selecting_reduction_backward(const at::Tensor& gradient, std::int64_t dim,
                                              const at::Tensor& indices,
                                              c10::SymIntArrayRef symbolic_sizes, bool keepdim) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic_sizes);
  if (!tessera::is_distributed(gradient) || !tessera::is_distributed(indices)) {
    return at::compositeimplicitautograd::value_selecting_reduction_backward(gradient, dim, indices,
                                                                             sizes, keepdim);
  }
  const bool kept = keepdim || sizes.empty();
  const auto values = kept ? gradient : gradient.unsqueeze(dim);
  return values.new_zeros(sizes).scatter(dim, kept ? indices : indices.unsqueeze(dim), values);
}

void implement_gradient_formulas(torch::Library& library) {
  library.impl("value_selecting_reduction_backward", &value_selecting_reduction_backward);
}

TESSERA_OVERRIDE_COMPOSITE(implement_gradient_formulas)

}  // namespace
}  // namespace tessera::detail
