#include "operators/number_type.h"

#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

/// For rule_of_call, which must see a number as the key does: everything that the plan depends on
/// has to be in the key.
NumberType number_type(const c10::IValue& value) {
  return value.isInt()             ? number_type(value.toInt())
         : value.isDouble()        ? number_type(value.toDouble())
         : value.isBool()          ? NumberType::kBool
         : value.isNone()          ? NumberType::kNone
         : value.isComplexDouble() ? number_type(value.toComplexDouble())
                                   : NumberType::kOther;
}

/// A wrapped number, as at::mul(x, 2.0) makes of its 2.0, is on the host and may be read at once.
/// The value of any other tensor is data: reading it could wait for a GPU, and a plan may not
/// depend on it.
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
