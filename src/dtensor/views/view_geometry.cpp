// Strides and storage offsets. A distributed tensor has computed global strides; its local tensor
// has others, and others again after a redistribution. Operators on memory (views, as_strided,
// expanded tensors) need both to match.

#include "views/view_geometry.h"

#include <c10/util/accumulate.h>

#include <algorithm>

#include "rank/below_autograd.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/kernels/detail/tensors_in_values.h"

namespace tessera::detail {
namespace {

/// Has global sizes and strides: those of a distributed tensor's wrapper.
at::Tensor meta_like(const at::Tensor& tensor) {
  return meta_tensor(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

}  // namespace

std::optional<std::vector<std::vector<std::int64_t>>> view_strides(
    const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    stack.push_back(kernels::with_tensors(argument, meta_like));
  }
  try {
    BelowAutograd guard;
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    // No kernel for meta tensors. Any other error is the caller's.
    return std::nullopt;
  }
  std::vector<std::vector<std::int64_t>> strides;
  kernels::visit_tensors(
      stack, [&](const at::Tensor& tensor) { strides.push_back(tensor.strides().vec()); });
  return strides;
}

std::vector<std::int64_t> complete_sizes(at::IntArrayRef from, at::IntArrayRef to) {
  std::vector<std::int64_t> sizes = to.vec();
  if (c10::multiply_integers(from) != 0) {
    return sizes;
  }
  const auto rest = std::ranges::mismatch(from, sizes);
  const auto inferred = std::ranges::find(rest.in2, sizes.end(), -1);
  if (inferred == sizes.end()) {
    return sizes;
  }
  // Positive with a single -1; libtorch refuses a second one.
  const std::int64_t known = -c10::multiply_integers(rest.in2, sizes.end());
  const std::int64_t elements = c10::multiply_integers(rest.in1, from.end());
  if (known > 0 && elements % known == 0) {
    *inferred = elements / known;
  }
  return sizes;
}

at::Tensor viewable(const at::Tensor& local, at::IntArrayRef sizes) {
  return strides_of_view(local, sizes) ? local : local.contiguous();
}

bool has_stride_zero(const at::Tensor& tensor) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {
      return true;
    }
  }
  return false;
}

at::Tensor narrow_stride_zero(at::Tensor tensor, at::IntArrayRef strides) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (strides[static_cast<std::size_t>(dim)] == 0 && tensor.size(dim) > 1) {
      tensor = tensor.narrow(dim, 0, 1);
    }
  }
  return tensor;
}

at::Tensor expand_stride_zero(const at::Tensor& tensor, at::IntArrayRef strides) {
  return narrow_stride_zero(tensor, strides).expand(tensor.sizes());
}

void copy_to_stride_zero(const at::Tensor& to, const at::Tensor& value) {
  narrow_stride_zero(to, to.strides()).copy_(narrow_stride_zero(value, to.strides()));
}

}  // namespace tessera::detail
