// Strides and storage offsets. A distributed tensor has global strides, which are computed; its
// local tensor has others, and after a redistribution others again. Operators that speak of memory
// (views, as_strided, expanded tensors) need the two brought together.

#include "views/view_geometry.h"

#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "plan/call_plan.h"
#include "tensor/below_autograd.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/shapes_by_libtorch.h"

namespace tessera::detail {
namespace {

/// Of global sizes and strides: those of a distributed tensor's wrapper.
at::Tensor meta_like(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  return meta_tensor(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

c10::IValue meta_argument(const c10::IValue& value) {
  if (value.isTensor()) {
    return meta_like(value.toTensor());
  }
  if (!value.isTensorList()) {
    return value;
  }
  c10::List<at::Tensor> list;
  for (const auto& tensor : value.toTensorVector()) {
    list.push_back(meta_like(tensor));
  }
  return list;
}

/// Whether `tensor` has these strides. Those of dimensions of size 1 do not count.
bool has_strides(const at::Tensor& tensor, at::IntArrayRef strides) {
  for (std::size_t dim = 0; dim < strides.size(); ++dim) {
    const auto d = static_cast<std::int64_t>(dim);
    if (tensor.size(d) > 1 && tensor.stride(d) != strides[dim]) {
      return false;
    }
  }
  return true;
}

/// Restores the stride-0 expansion of a tensor that was gathered.
at::Tensor expand_again(const at::Tensor& tensor, at::IntArrayRef strides) {
  // Only the elements in memory are copied; a plain copy would be as large as the expanded tensor.
  const BelowAutograd guard;
  return narrow_stride_zero(tensor, strides).contiguous().expand(tensor.sizes());
}

/// Whether as_strided(tensor, sizes, strides, offset) addresses elements of `tensor` only. Marks
/// its elements in a storage of the same size and looks where the view goes.
bool reaches_elements(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::int64_t offset) {
  const BelowAutograd guard;
  const auto extent = static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.element_size());
  // On the host, whatever the device of the tensor: only places are compared.
  const auto marks = at::zeros({extent}, at::kBool);
  marks.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).fill_(true);
  return marks.as_strided(sizes, strides, offset).all().item<bool>();
}

}  // namespace

std::optional<std::vector<std::vector<std::int64_t>>> view_strides(
    const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    stack.push_back(meta_argument(argument));
  }
  try {
    BelowAutograd guard;
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    // No kernel for meta tensors. Any other error is the one that the caller made.
    return std::nullopt;
  }
  std::vector<std::vector<std::int64_t>> strides;
  for (const auto& value : stack) {
    if (value.isTensor()) {
      strides.push_back(value.toTensor().strides().vec());
    }
    if (!value.isTensorList()) {
      continue;
    }
    for (const auto& tensor : value.toTensorVector()) {
      strides.push_back(tensor.strides().vec());
    }
  }
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
  // The two products have one sign: a second -1 leaves it to libtorch to refuse.
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

void add_local_storage_offset(const OperatorInfo& info, const CallPlan& plan,
                              std::span<c10::IValue> arguments) {
  const auto where = static_cast<std::size_t>(info.storage_offset);
  const auto& input = plan.inputs.front();
  auto local = arguments[0].toTensor();
  // A gathered tensor has an element in memory for each position, where the global one shares them.
  if (input.plan && !has_strides(local, input.spec->strides)) {
    local = expand_again(local, input.spec->strides);
    arguments[0] = local;
  }
  auto& offset = arguments[where];
  offset = (offset.isNone() ? 0 : offset.toInt()) + local.storage_offset();
  TESSERA_CHECK(has_strides(local, input.spec->strides), info.name,
                " asks for memory by its strides. The tensor has strides ",
                c10::IntArrayRef(input.spec->strides), ", but was gathered and has ",
                local.strides(), " now: take a clone() first");
  // Without a gather the memory is the program's own. A dense tensor has nothing between its
  // elements.
  if (!input.plan || local.is_meta() || input.spec->geometry.non_overlapping_and_dense) {
    return;
  }
  TESSERA_CHECK(reaches_elements(local, arguments[where - 2].toIntVector(),
                                 arguments[where - 1].toIntVector(), offset.toInt()),
                info.name,
                " asks for memory between the elements of a tensor that has to be gathered, which "
                "does not come along: redistribute what it is a view of to Replicate first");
}

}  // namespace tessera::detail
