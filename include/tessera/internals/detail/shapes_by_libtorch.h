// Sizes and strides as libtorch computes them within its operators: of a convolution, of a view,
// and a meta tensor of given strides without a dispatch. Public is the operator, which needs a
// tensor on a device that has a kernel for it.
//
// No version differs.
//
// Canary: ShapesByLibtorchCanary.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

struct Convolution {
  std::vector<std::int64_t> stride, padding, dilation;
  bool transposed = false;
  std::vector<std::int64_t> output_padding = {};
  std::int64_t groups = 1;
};

/// The sizes of the result.
std::vector<std::int64_t> convolution_sizes(c10::IntArrayRef input, c10::IntArrayRef weight,
                                            const Convolution& of);

/// The strides of a view with these sizes; nullopt where it would need a copy.
std::optional<std::vector<std::int64_t>> strides_of_view(const at::Tensor& tensor,
                                                         c10::IntArrayRef sizes);

/// On the meta device. No operator runs: no mode or key of the thread sees it.
at::Tensor meta_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

}  // namespace tessera::detail
TESSERA_API_END
