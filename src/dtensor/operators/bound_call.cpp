#include "operators/bound_call.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

// Converts between libtorch's values and core's values: a call's stack to an OpCall, and a rule's
// arguments to libtorch values. Only this file knows both types of values.

namespace {

/// Binds a tensor. An undefined tensor becomes None, because rules and plans number only defined
/// tensors.
Argument bind_tensor(const c10::IValue& value, BoundCall& bound) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    return {};
  }
  const auto& tensor = value.toTensor();
  bound.tensors.push_back(tensor);
  bound.call.tensors.push_back(
      {tensor.sizes().vec(), static_cast<std::int64_t>(tensor.element_size())});
  return TensorRef{static_cast<int>(bound.tensors.size()) - 1};
}

Argument bind_tensor_list(const c10::IValue& value, BoundCall& bound) {
  if (value.isNone()) {
    return {};
  }
  std::vector<TensorRef> refs;
  for (const auto& element : value.toListRef()) {
    const auto ref = bind_tensor(element, bound);
    refs.push_back(std::holds_alternative<TensorRef>(ref) ? std::get<TensorRef>(ref) : TensorRef{});
  }
  return refs;
}

Argument bind_scalar(const c10::IValue& value) {
  if (value.isInt()) {
    return value.toInt();
  }
  if (value.isBool()) {
    return value.toBool();
  }
  if (value.isDouble()) {
    return value.toDouble();
  }
  return {};
}

/// The kind of a libtorch type. Core cannot compute it, because core does not use c10.
DType::Kind dtype_kind_of(c10::ScalarType type) {
  using Kind = DType::Kind;
  switch (type) {
    case c10::ScalarType::Bool:
      return Kind::kBool;
    case c10::ScalarType::Byte:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
      return Kind::kUnsigned;
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return Kind::kSigned;
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
      return Kind::kFloating;
    default:
      return c10::isComplexType(type) ? Kind::kComplex : Kind::kOther;
  }
}

/// Binds an element type, which is an int on libtorch's stack.
Argument bind_dtype(const c10::IValue& value) {
  if (!value.isInt()) {
    return {};
  }
  const auto type = static_cast<c10::ScalarType>(value.toInt());
  return DType{dtype_kind_of(type), static_cast<std::int64_t>(c10::elementSize(type)),
               value.toInt()};
}

/// Binds values that are not tensors. Values that no rule reads (a device, an omitted memory
/// format) become None. Flags become the integers 0 and 1, so that rules have one kind of list.
Argument bind_static(const c10::IValue& value) {
  if (value.isString()) {
    return value.toStringRef();
  }
  if (value.isIntList()) {
    return value.toIntVector();
  }
  if (value.isBoolList()) {
    const auto list = value.toBoolList();
    std::vector<std::int64_t> flags;
    for (std::size_t i = 0; i < list.size(); ++i) {
      flags.push_back(list.get(i));
    }
    return flags;
  }
  return bind_scalar(value);
}

}  // namespace

/// Numbers of kind kScalar are bound without their value: their values are in no cache key, so a
/// rule must not depend on them. OperatorInfo uses kScalar only if the rule reads no numbers.
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
      case Kind::kDType:
        bound.call.args.push_back(bind_dtype(value));
        break;
      case Kind::kScalar:
      case Kind::kGenerator:
      case Kind::kNumberList:
      case Kind::kStatic:
        bound.call.args.push_back(bind_static(value));
        break;
    }
  }
  return bound;
}

c10::IValue to_ivalue(const Argument& argument, const c10::Type& type,
                      std::span<const at::Tensor> tensors) {
  // Converts a list to the element type in the schema, which is needed if the list is empty or
  // contains None.
  struct Convert {
    const c10::Type& type;
    std::span<const at::Tensor> tensors;

    c10::IValue operator()(std::monostate) const { return {}; }
    c10::IValue operator()(bool value) const { return value; }
    c10::IValue operator()(std::int64_t value) const { return value; }
    c10::IValue operator()(double value) const { return value; }
    c10::IValue operator()(const std::string& value) const { return value; }
    c10::IValue operator()(const DType& type) const { return type.id; }
    c10::IValue operator()(const std::vector<std::int64_t>& value) const { return value; }
    c10::IValue operator()(TensorRef ref) const {
      return tensors[static_cast<std::size_t>(ref.index)];
    }
    c10::IValue operator()(const std::vector<TensorRef>& refs) const {
      const auto* list = type.castRaw<c10::ListType>();
      if (list != nullptr && list->getElementType()->kind() == c10::TypeKind::TensorType) {
        c10::List<at::Tensor> result;
        for (auto ref : refs) {
          result.push_back((*this)(ref).toTensor());
        }
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

/// Classifies a number. The cache key and rule_of_call must classify it in the same way, so both
/// call this function.
NumberType number_type(const c10::IValue& value) {
  return value.isInt()             ? number_type(value.toInt())
         : value.isDouble()        ? number_type(value.toDouble())
         : value.isBool()          ? NumberType::kBool
         : value.isNone()          ? NumberType::kNone
         : value.isComplexDouble() ? number_type(value.toComplexDouble())
                                   : NumberType::kOther;
}

/// The class of a wrapped number, such as the 2.0 in at::mul(x, 2.0), which is on the host and may
/// be read. The value of any other tensor is data: reading it could wait for a GPU, and a plan must
/// not depend on it.
NumberType number_type(const at::Tensor& tensor) {
  if (!is_wrapped_number(tensor) || !tensor.is_cpu()) {
    return NumberType::kNone;
  }
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Double:
      return number_type(*tensor.const_data_ptr<double>());
    case c10::ScalarType::Long:
      return number_type(*tensor.const_data_ptr<std::int64_t>());
    case c10::ScalarType::ComplexDouble:
      return number_type(*tensor.const_data_ptr<c10::complex<double>>());
    default:
      return NumberType::kNone;
  }
}

}  // namespace tessera::detail
