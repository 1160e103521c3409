// How rules read the arguments of a call. The accessors are lenient where schemas are (an int is a
// number, one dimension is a list of one) and throw for the rest: then the rule reads another
// argument than the schema has there, which is a bug in a table, not in the user's call.
#include "tessera/core/op_call.h"

#include <functional>
#include <numeric>

#include "tessera/core/error.h"

namespace tessera {
namespace {

/// What an argument past the end reads as: schemas gain arguments with time, and out= forms drop
/// theirs (rule_registry.cpp).
const Argument kNone;

const Argument& argument(const OpCall& call, std::size_t arg) {
  return arg < call.args.size() ? call.args[arg] : kNone;
}

/// `what` completes the message: the kind that the rule expected.
template <class T>
const T& get(const OpCall& call, std::size_t arg, const char* what) {
  const T* value = std::get_if<T>(&argument(call, arg));
  TESSERA_CHECK(value, call.op, ": argument ", arg, " is not ", what,
                "; the operator's rule and its schema disagree");
  return *value;
}

}  // namespace

std::int64_t TensorMeta::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

/// An optional tensor is a TensorRef of -1 or a None, depending on where it stands.
bool OpCall::has_tensor(std::size_t arg) const {
  const auto* ref = std::get_if<TensorRef>(&argument(*this, arg));
  return ref && ref->index >= 0;
}

int OpCall::tensor_index(std::size_t arg) const {
  const int index = get<TensorRef>(*this, arg, "a tensor").index;
  TESSERA_CHECK(index >= 0, op, ": argument ", arg, " is None where a tensor is needed");
  return index;
}

const TensorMeta& OpCall::tensor(std::size_t arg) const {
  return tensors.at(static_cast<std::size_t>(tensor_index(arg)));
}

/// One tensor where a list is expected: overloads that differ in just that share a rule.
std::vector<TensorRef> OpCall::tensor_list(std::size_t arg) const {
  if (is_none(arg)) {
    return {};
  }
  if (const auto* one = std::get_if<TensorRef>(&argument(*this, arg))) {
    return {*one};
  }
  return get<std::vector<TensorRef>>(*this, arg, "a list of tensors");
}

bool OpCall::is_none(std::size_t arg) const {
  return std::holds_alternative<std::monostate>(argument(*this, arg));
}

/// A bool counts as 0 or 1, so that flags may be read like numbers.
std::int64_t OpCall::integer(std::size_t arg) const {
  if (const auto* flag = std::get_if<bool>(&argument(*this, arg))) {
    return *flag ? 1 : 0;
  }
  return get<std::int64_t>(*this, arg, "an integer");
}

std::int64_t OpCall::integer_or(std::size_t arg, std::int64_t otherwise) const {
  return is_none(arg) ? otherwise : integer(arg);
}

bool OpCall::boolean_or(std::size_t arg, bool otherwise) const {
  return is_none(arg) ? otherwise : integer(arg) != 0;
}

const DType& OpCall::dtype(std::size_t arg) const {
  return get<DType>(*this, arg, "a type of elements");
}

/// A Scalar arrives as whatever the caller passed: 2 or 2.0.
double OpCall::number(std::size_t arg) const {
  if (const auto* real = std::get_if<double>(&argument(*this, arg))) {
    return *real;
  }
  return static_cast<double>(integer(arg));
}

/// libtorch turns dim=1 into a list of one for some overloads and not for others.
std::vector<std::int64_t> OpCall::integers(std::size_t arg) const {
  if (is_none(arg)) {
    return {};
  }
  if (std::holds_alternative<std::int64_t>(argument(*this, arg))) {
    return {integer(arg)};
  }
  return get<std::vector<std::int64_t>>(*this, arg, "a list of integers");
}

}  // namespace tessera
