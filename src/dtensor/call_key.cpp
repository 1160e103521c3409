#include "call_key.h"

#include <bit>
#include <cstring>

#include "distributed_impl.h"

namespace tessera::detail {
namespace {

// Words that are not a pointer: pointers to specs are aligned, so the low bits tell them apart.
constexpr std::uint64_t kNone = 1;
constexpr std::uint64_t kPlainTensor = 3;
constexpr std::uint64_t kList = 5;
constexpr std::uint64_t kValue = 7;

std::uint64_t tagged(std::uint64_t value, std::uint64_t tag) {
  return value << 3 | tag;
}

CallKey::Number number_in(const c10::IValue& value) {
  using Number = CallKey::Number;
  return value.isInt()      ? Number::kInteger
         : value.isDouble() ? Number::kDouble
         : value.isBool()   ? Number::kBool
         : value.isNone()   ? Number::kNone
                            : Number::kOther;
}

}  // namespace

void CallKey::begin(const OperatorInfo& info) {
  words_.clear();
  add(reinterpret_cast<std::uintptr_t>(&info));
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
        add_type_of(number_in(value));
        break;
      case Kind::kStatic:
        add_static(value);
        break;
      case Kind::kIgnored:
        break;
    }
  }
}

void CallKey::add_none() {
  add(kNone);
}

void CallKey::add_list(std::size_t size) {
  add(tagged(size, kList));
}

void CallKey::add_type_of(Number number) {
  add(tagged(static_cast<std::uint64_t>(number), kValue));
}

void CallKey::add_integer(std::int64_t value) {
  add_type_of(Number::kInteger);
  add(static_cast<std::uint64_t>(value));
}

void CallKey::add_bool(bool value) {
  add_type_of(Number::kBool);
  add(static_cast<std::uint64_t>(value));
}

void CallKey::add_double(double value) {
  add_type_of(Number::kDouble);
  add(std::bit_cast<std::uint64_t>(value));
}

void CallKey::add_integers(c10::IntArrayRef values) {
  add(tagged(values.size(), kList));
  for (auto value : values) add(static_cast<std::uint64_t>(value));
}

void CallKey::add_element(const c10::IValue& value) {
  if (value.isTensor()) {
    add_tensor(value.toTensor());
  } else {
    add_none();
  }
}

void CallKey::add_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    add(kNone);
  } else if (const auto* impl = as_distributed(tensor)) {
    add(reinterpret_cast<std::uintptr_t>(impl->spec().get()));
  } else {
    const auto wrapped =
        static_cast<std::uint64_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    const auto type = static_cast<std::uint64_t>(tensor.scalar_type());
    add(tagged(static_cast<std::uint64_t>(tensor.dim()) << 16 | type << 8 | wrapped, kPlainTensor));
    for (auto size : tensor.sizes()) add(static_cast<std::uint64_t>(size));
  }
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

std::uint64_t CallKey::hash() const {
  std::uint64_t hash = words_.size();
  for (auto word : words_) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace tessera::detail
