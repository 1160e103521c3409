#include "memory_view.h"

#include <ATen/ops/zeros.h>

#include "below_autograd.h"
#include "expanded.h"
#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

bool lies_as(const at::Tensor& tensor, at::IntArrayRef strides) {
  for (std::size_t dim = 0; dim < strides.size(); ++dim) {
    const auto d = static_cast<std::int64_t>(dim);
    if (tensor.size(d) > 1 && tensor.stride(d) != strides[dim]) return false;
  }
  return true;
}

/// A gathered tensor of which several positions were one in memory, so again.
at::Tensor expanded_again(const at::Tensor& tensor, at::IntArrayRef strides) {
  const BelowAutograd guard;
  return one_of_expanded(tensor, strides).contiguous().expand(tensor.sizes());
}

/// Whether as_strided(tensor, sizes, strides, offset) reaches nothing but elements of `tensor`.
bool reaches_elements(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::int64_t offset) {
  const BelowAutograd guard;
  const auto extent = static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.element_size());
  const auto marks = at::zeros({extent}, at::kBool);
  marks.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).fill_(true);
  return marks.as_strided(sizes, strides, offset).all().item<bool>();
}

}  // namespace

void begin_at_local_tensor(const OperatorInfo& info, const CallPlan& plan,
                           std::span<c10::IValue> arguments) {
  const auto where = static_cast<std::size_t>(info.storage_offset);
  const auto& input = plan.inputs.front();
  auto local = arguments[0].toTensor();
  if (input.plan && !lies_as(local, input.spec->strides)) {
    local = expanded_again(local, input.spec->strides);
    arguments[0] = local;
  }
  auto& offset = arguments[where];
  offset = (offset.isNone() ? 0 : offset.toInt()) + local.storage_offset();
  TESSERA_CHECK(lies_as(local, input.spec->strides), info.name,
                " asks for memory by its strides, but of a tensor with strides ",
                c10::IntArrayRef(input.spec->strides), " that lies here with ", local.strides(),
                ", for it had to be gathered: take a clone() first");
  if (!input.plan || local.is_meta() || input.spec->geometry.non_overlapping_and_dense) return;
  TESSERA_CHECK(reaches_elements(local, arguments[where - 2].toIntVector(),
                                 arguments[where - 1].toIntVector(), offset.toInt()),
                info.name,
                " asks for memory between the elements of a tensor that has to be gathered, which "
                "does not come along: redistribute what it is a view of to Replicate first");
}

}  // namespace tessera::detail
