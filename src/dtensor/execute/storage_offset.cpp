#include "execute/storage_offset.h"

#include <ATen/ops/zeros.h>

#include "rank/below_autograd.h"
#include "tessera/core/error.h"
#include "views/view_geometry.h"

namespace tessera::detail {
namespace {

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
