#include "tessera/internals/detail/shapes_by_libtorch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/ConvUtils.h>

namespace tessera::detail {

std::vector<std::int64_t> convolution_sizes(c10::IntArrayRef input, c10::IntArrayRef weight,
                                            const Convolution& of) {
  return of.transposed
             ? at::native::conv_input_size(input, weight, of.padding, of.output_padding, of.stride,
                                           of.dilation, of.groups)
             : at::native::conv_output_size(input, weight, of.padding, of.stride, of.dilation);
}

std::optional<std::vector<std::int64_t>> strides_of_view(const at::Tensor& tensor,
                                                         c10::IntArrayRef sizes) {
  return at::detail::computeStride(tensor.sizes(), tensor.strides(), sizes);
}

at::Tensor meta_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  return at::detail::empty_strided_meta(sizes, strides, dtype, c10::kStrided,
                                        c10::Device(c10::kMeta), std::nullopt);
}

}  // namespace tessera::detail
