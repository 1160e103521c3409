#include "call_key.h"

#include <algorithm>
#include <cstring>

namespace tessera::detail {

CallKey::Number CallKey::number_of(const c10::IValue& value) {
  return value.isInt()             ? number_of(value.toInt())
         : value.isDouble()        ? number_of(value.toDouble())
         : value.isBool()          ? Number::kBool
         : value.isNone()          ? Number::kNone
         : value.isComplexDouble() ? number_of(value.toComplexDouble())
                                   : Number::kOther;
}

CallKey::Number CallKey::number_of(const at::Tensor& tensor) {
  if (!tensor.unsafeGetTensorImpl()->is_wrapped_number() || !tensor.is_cpu()) return Number::kNone;
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Double:
      return number_of(*tensor.const_data_ptr<double>());
    case c10::ScalarType::Long:
      return number_of(*tensor.const_data_ptr<std::int64_t>());
    case c10::ScalarType::ComplexDouble:
      return number_of(*tensor.const_data_ptr<c10::complex<double>>());
    default:
      return Number::kNone;
  }
}

void CallKey::build(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  using Kind = OperatorInfo::ArgumentKind;
  begin(info);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    switch (info.arguments[i]) {
      case Kind::kTensor:
        add_element(value);
        break;
      case Kind::kTensorList:
      case Kind::kOptionalTensorList:
        if (value.isNone()) {
          add_none();
          break;
        }
        add_list(value.toListRef().size());
        for (const auto& element : value.toListRef()) add_element(element);
        break;
      case Kind::kScalar:
        add_type_of(number_of(value));
        break;
      case Kind::kStatic:
        add_static(value);
        break;
      case Kind::kIgnored:
        if (!value.isList()) break;
        for (const auto& element : value.toListRef()) add_type_of(number_of(element));
        break;
    }
  }
}

void CallKey::add_element(const c10::IValue& value) {
  if (value.isTensor()) {
    add_tensor(value.toTensor());
  } else {
    add_none();
  }
}

void CallKey::add_plain(const at::Tensor& tensor) {
  if (!tensor.defined()) return add_none();
  const auto wrapped =
      static_cast<std::uint64_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  const auto meta = static_cast<std::uint64_t>(tensor.is_meta());
  const auto type = static_cast<std::uint64_t>(tensor.scalar_type());
  add(tagged(static_cast<std::uint64_t>(tensor.dim()) << 16 | type << 8 | meta << 1 | wrapped,
             kPlainTensor));
  if (wrapped != 0) add_type_of(number_of(tensor));
  for (const auto size : tensor.sizes()) add(static_cast<std::uint64_t>(size));
  if (tensor.layout() != c10::kStrided) return;
  for (const auto stride : tensor.strides()) add(static_cast<std::uint64_t>(stride));
}

void CallKey::add_static(const c10::IValue& value) {
  if (value.isNone()) {
    add_none();
  } else if (value.isInt()) {
    add_integer(value.toInt());
  } else if (value.isBool()) {
    add_bool(value.toBool());
  } else if (value.isDouble()) {
    add_double(value.toDouble());
  } else if (value.isString()) {
    add_text(value.toStringRef());
  } else if (value.isDevice()) {
    const auto device = value.toDevice();
    add(tagged(static_cast<std::uint64_t>(device.type()) << 16 |
                   static_cast<std::uint16_t>(device.index()),
               kValue));
  } else if (value.isIntList()) {
    const auto list = value.toIntList();
    add(tagged(list.size(), kList));
    for (std::size_t i = 0; i < list.size(); ++i) add(static_cast<std::uint64_t>(list.get(i)));
  } else if (value.isList()) {
    add(tagged(value.toListRef().size(), kList));
    for (const auto& element : value.toListRef()) add_static(element);
  } else {
    add_text(value.tagKind());
  }
}

void CallKey::add_text(const std::string& text) {
  add(tagged(text.size(), kList));
  for (std::size_t i = 0; i < text.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
    add(word);
  }
}

}  // namespace tessera::detail
