#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>

#include "distributed_impl.h"
#include "operator_info.h"

namespace tessera::detail {

/// What the outcome of a call depends on, as a flat list of words: the operator, the interned spec
/// of each distributed tensor, sizes, strides and type of each plain one, and the arguments that
/// rules read. Reused from call to call, so that building one allocates nothing.
class CallKey {
 public:
  /// Rebuilds the key for a call of `info` with `arguments`.
  void build(const OperatorInfo& info, std::span<const c10::IValue> arguments);

  // The same, argument by argument, for kernels that have them unboxed.
  void begin(const OperatorInfo& info) {
    words_.clear();
    add(reinterpret_cast<std::uintptr_t>(&info));
  }
  void add_tensor(const at::Tensor& tensor) {
    const auto* impl = tensor.defined() ? as_distributed(tensor) : nullptr;
    if (impl != nullptr) [[likely]] {
      add(reinterpret_cast<std::uintptr_t>(impl->spec().get()) |
          (impl->is_meta() ? kMeta : std::uint64_t{0}));
    } else {
      add_plain(tensor);
    }
  }
  void add_none() { add(kNone); }
  /// A list of so many tensors, which follow.
  void add_list(std::size_t size) { add(tagged(size, kList)); }
  void add_integer(std::int64_t value) {
    add_type_of(Number::kInteger);
    add(static_cast<std::uint64_t>(value));
  }
  void add_bool(bool value) {
    add_type_of(Number::kBool);
    add(static_cast<std::uint64_t>(value));
  }
  void add_double(double value) {
    add_type_of(Number::kDouble);
    add(std::bit_cast<std::uint64_t>(value));
  }
  void add_integers(c10::IntArrayRef values) {
    add(tagged(values.size(), kList));
    for (const auto value : values) add(static_cast<std::uint64_t>(value));
  }
  /// A number of which only the type counts, and whether a sum may be multiplied or divided by it
  /// term by term.
  enum class Number : std::uint8_t {
    kInteger = 1,
    kDouble,
    kBool,
    kNone,
    kOther,
    kZeroInteger,
    kZero,
    kNotFinite,
    kNotFiniteOther
  };
  static Number number_of(bool) { return Number::kBool; }
  static Number number_of(std::int64_t value) {
    return value == 0 ? Number::kZeroInteger : Number::kInteger;
  }
  static Number number_of(double value) {
    return !std::isfinite(value) ? Number::kNotFinite
           : value == 0          ? Number::kZero
                                 : Number::kDouble;
  }
  static Number number_of(const c10::complex<double>& value) {
    const bool finite = std::isfinite(value.real()) && std::isfinite(value.imag());
    return finite ? Number::kOther : Number::kNotFiniteOther;
  }
  static Number number_of(const c10::IValue& value);
  /// Of a plain tensor; one that is not a wrapped number: kNone.
  static Number number_of(const at::Tensor& tensor);
  void add_type_of(Number number) { add(tagged(static_cast<std::uint64_t>(number), kValue)); }

  std::span<const std::uint64_t> words() const { return {words_.data(), words_.size()}; }
  std::uint64_t hash() const {
    std::uint64_t hash = words_.size();
    for (const auto word : words_) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 32;
    }
    return hash;
  }

 private:
  // Words that are not a pointer: pointers to specs are aligned, so the low bits tell them apart.
  static constexpr std::uint64_t kNone = 1;
  static constexpr std::uint64_t kPlainTensor = 3;
  static constexpr std::uint64_t kList = 5;
  static constexpr std::uint64_t kValue = 7;
  /// Added to a pointer: forms that look at the data take no meta tensors.
  static constexpr std::uint64_t kMeta = 2;
  static constexpr std::uint64_t tagged(std::uint64_t value, std::uint64_t tag) {
    return value << 3 | tag;
  }

  void add(std::uint64_t word) { words_.push_back(word); }
  void add_plain(const at::Tensor& tensor);
  void add_element(const c10::IValue& value);
  void add_static(const c10::IValue& value);
  void add_text(const std::string& text);

  c10::SmallVector<std::uint64_t, 32> words_;
};

}  // namespace tessera::detail
