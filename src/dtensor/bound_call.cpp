#include "bound_call.h"

#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

Argument bind_tensor(const c10::IValue& value, BoundCall& bound) {
  if (!value.isTensor() || !value.toTensor().defined()) return {};
  const auto& tensor = value.toTensor();
  bound.tensors.push_back(tensor);
  bound.call.tensors.push_back(
      {tensor.sizes().vec(), static_cast<std::int64_t>(tensor.element_size())});
  return TensorRef{static_cast<int>(bound.tensors.size()) - 1};
}

Argument bind_tensor_list(const c10::IValue& value, BoundCall& bound) {
  if (value.isNone()) return {};
  std::vector<TensorRef> refs;
  for (const auto& element : value.toListRef()) {
    const auto ref = bind_tensor(element, bound);
    refs.push_back(std::holds_alternative<TensorRef>(ref) ? std::get<TensorRef>(ref) : TensorRef{});
  }
  return refs;
}

Argument bind_scalar(const c10::IValue& value) {
  if (value.isInt()) return value.toInt();
  if (value.isBool()) return value.toBool();
  if (value.isDouble()) return value.toDouble();
  return {};
}

Argument bind_static(const c10::IValue& value) {
  if (value.isString()) return value.toStringRef();
  if (value.isIntList()) return value.toIntVector();
  if (value.isBoolList()) {
    const auto list = value.toBoolList();
    std::vector<std::int64_t> flags;
    for (std::size_t i = 0; i < list.size(); ++i) flags.push_back(list.get(i));
    return flags;
  }
  return bind_scalar(value);
}

}  // namespace

BoundCall bind_call(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  using Kind = OperatorInfo::ArgumentKind;
  BoundCall bound;
  bound.call.op = info.name;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    switch (info.arguments[i]) {
      case Kind::kTensor:
        bound.call.args.push_back(bind_tensor(value, bound));
        break;
      case Kind::kTensorList:
      case Kind::kOptionalTensorList:
        bound.call.args.push_back(bind_tensor_list(value, bound));
        break;
      case Kind::kScalar:
      case Kind::kStatic:
      case Kind::kIgnored:
        bound.call.args.push_back(bind_static(value));
        break;
    }
  }
  return bound;
}

c10::IValue to_ivalue(const Argument& argument, const c10::Type& type,
                      std::span<const at::Tensor> tensors) {
  struct Convert {
    const c10::Type& type;
    std::span<const at::Tensor> tensors;

    c10::IValue operator()(std::monostate) const { return {}; }
    c10::IValue operator()(bool value) const { return value; }
    c10::IValue operator()(std::int64_t value) const { return value; }
    c10::IValue operator()(double value) const { return value; }
    c10::IValue operator()(const std::string& value) const { return value; }
    c10::IValue operator()(const std::vector<std::int64_t>& value) const { return value; }
    c10::IValue operator()(TensorRef ref) const {
      return tensors[static_cast<std::size_t>(ref.index)];
    }
    c10::IValue operator()(const std::vector<TensorRef>& refs) const {
      const auto* list = type.castRaw<c10::ListType>();
      if (list != nullptr && list->getElementType()->kind() == c10::TypeKind::TensorType) {
        c10::List<at::Tensor> result;
        for (auto ref : refs) result.push_back((*this)(ref).toTensor());
        return result;
      }
      c10::List<std::optional<at::Tensor>> result;
      for (auto ref : refs) {
        result.push_back(ref.index < 0 ? std::nullopt : std::optional((*this)(ref).toTensor()));
      }
      return result;
    }
  };
  return std::visit(Convert{type, tensors}, argument);
}

}  // namespace tessera::detail
