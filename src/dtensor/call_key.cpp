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

std::uint64_t scalar_type_of(const c10::IValue& value) {
  return value.isInt()      ? 1u
         : value.isDouble() ? 2u
         : value.isBool()   ? 3u
         : value.isNone()   ? 4u
                            : 5u;
}

}  // namespace

void CallKey::build(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  using Kind = OperatorInfo::ArgumentKind;
  words_.clear();
  add(reinterpret_cast<std::uintptr_t>(&info));
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    switch (info.arguments[i]) {
      case Kind::kTensor:
        add_tensor(value);
        break;
      case Kind::kTensorList:
      case Kind::kOptionalTensorList:
        if (value.isNone()) {
          add(kNone);
          break;
        }
        add(tagged(value.toListRef().size(), kList));
        for (const auto& element : value.toListRef()) add_tensor(element);
        break;
      case Kind::kScalar:
        add(tagged(scalar_type_of(value), kValue));
        break;
      case Kind::kStatic:
        add_static(value);
        break;
      case Kind::kIgnored:
        break;
    }
  }
}

void CallKey::add_tensor(const c10::IValue& value) {
  if (value.isTensor()) {
    add_tensor(value.toTensor());
  } else {
    add(kNone);
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
    add(kNone);
  } else if (value.isInt() || value.isBool()) {
    add(tagged(static_cast<std::uint64_t>(scalar_type_of(value)), kValue));
    add(static_cast<std::uint64_t>(value.isInt() ? value.toInt() : value.toBool()));
  } else if (value.isDouble()) {
    add(tagged(scalar_type_of(value), kValue));
    add(std::bit_cast<std::uint64_t>(value.toDouble()));
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
