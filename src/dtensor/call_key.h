#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <span>
#include <vector>

#include "operator_info.h"
#include "tensor_spec.h"

namespace tessera::detail {

/// What the outcome of a call depends on, as a flat list of words: the operator, the interned spec
/// of each distributed tensor, sizes and type of each plain one, and the arguments that rules read.
/// Reused from call to call, so that building one allocates nothing.
class CallKey {
 public:
  /// Rebuilds the key for a call of `info` with `arguments`.
  void build(const OperatorInfo& info, std::span<const c10::IValue> arguments);

  // The same, argument by argument, for kernels that have them unboxed.
  void begin(const OperatorInfo& info);
  void add_tensor(const at::Tensor& tensor);
  void add_none();
  /// A list of so many tensors, which follow.
  void add_list(std::size_t size);
  void add_integer(std::int64_t value);
  void add_bool(bool value);
  void add_double(double value);
  void add_integers(c10::IntArrayRef values);
  /// A number of which only the type counts.
  enum class Number : std::uint8_t { kInteger = 1, kDouble, kBool, kNone, kOther };
  void add_type_of(Number number);

  std::span<const std::uint64_t> words() const { return words_; }
  std::uint64_t hash() const;

 private:
  void add(std::uint64_t word) { words_.push_back(word); }
  void add_element(const c10::IValue& value);
  void add_static(const c10::IValue& value);
  void add_text(const std::string& text);

  std::vector<std::uint64_t> words_;
};

}  // namespace tessera::detail
