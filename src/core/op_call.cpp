#include "tessera/core/op_call.h"

#include <functional>
#include <numeric>

#include "tessera/core/error.h"

namespace tessera {
namespace {

const Argument kNone;

const Argument& argument(const OpCall& call, std::size_t arg) {
  return arg < call.args.size() ? call.args[arg] : kNone;
}

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

std::vector<TensorRef> OpCall::tensor_list(std::size_t arg) const {
  if (is_none(arg)) return {};
  if (const auto* one = std::get_if<TensorRef>(&argument(*this, arg))) return {*one};
  return get<std::vector<TensorRef>>(*this, arg, "a list of tensors");
}

bool OpCall::is_none(std::size_t arg) const {
  return std::holds_alternative<std::monostate>(argument(*this, arg));
}

std::int64_t OpCall::integer(std::size_t arg) const {
  if (const auto* flag = std::get_if<bool>(&argument(*this, arg))) return *flag ? 1 : 0;
  return get<std::int64_t>(*this, arg, "an integer");
}

std::int64_t OpCall::integer_or(std::size_t arg, std::int64_t otherwise) const {
  return is_none(arg) ? otherwise : integer(arg);
}

bool OpCall::boolean_or(std::size_t arg, bool otherwise) const {
  return is_none(arg) ? otherwise : integer(arg) != 0;
}

double OpCall::number(std::size_t arg) const {
  if (const auto* real = std::get_if<double>(&argument(*this, arg))) return *real;
  return static_cast<double>(integer(arg));
}

std::vector<std::int64_t> OpCall::integers(std::size_t arg) const {
  if (is_none(arg)) return {};
  if (std::holds_alternative<std::int64_t>(argument(*this, arg))) return {integer(arg)};
  return get<std::vector<std::int64_t>>(*this, arg, "a list of integers");
}

}  // namespace tessera
