#include "view_geometry.h"

#include <ATen/EmptyTensor.h>

#include "below_autograd.h"

namespace tessera::detail {
namespace {

at::Tensor meta_like(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type(),
                                        c10::kStrided, c10::Device(c10::kMeta), std::nullopt);
}

c10::IValue meta_argument(const c10::IValue& value) {
  if (value.isTensor()) return meta_like(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const auto& tensor : value.toTensorVector()) list.push_back(meta_like(tensor));
  return list;
}

}  // namespace

std::optional<std::vector<std::vector<std::int64_t>>> view_strides(
    const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) stack.push_back(meta_argument(argument));
  try {
    BelowAutograd guard;
    op.callBoxed(stack);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
  std::vector<std::vector<std::int64_t>> strides;
  for (const auto& value : stack) {
    if (value.isTensor()) strides.push_back(value.toTensor().strides().vec());
    if (!value.isTensorList()) continue;
    for (const auto& tensor : value.toTensorVector()) strides.push_back(tensor.strides().vec());
  }
  return strides;
}

}  // namespace tessera::detail
