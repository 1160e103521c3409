// Composite operators that, where no gradient is wanted, run a kernel of their own on the CPU's
// memory. A distributed tensor has none to run it on: it takes the operators that autograd sees.

#include <ATen/core/Tensor.h>

#include <ATen/ops/max_pool1d_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/max_pool1d_with_indices.h>

#include "override_composite.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::detail {
namespace {

at::Tensor max_pool1d(const at::Tensor& self, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  if (!tessera::is_distributed(self)) {
    return at::compositeimplicitautograd::max_pool1d(self, kernel_size, stride, padding, dilation,
                                                     ceil_mode);
  }
  return std::get<0>(
      at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
}

void implement_cpu_kernels(torch::Library& library) {
  library.impl("max_pool1d", &max_pool1d);
}

TESSERA_OVERRIDE_COMPOSITE(implement_cpu_kernels)

}  // namespace
}  // namespace tessera::detail
