#include "rule_cases.h"
#include "testing/values.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/sin.h>

#include <optional>
#include <utility>

namespace tessera::testing {
namespace {

c10::IValue cloned(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().clone();
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.clone());
    }
    return list;
  }
  return value;
}

}  // namespace

at::Tensor reals(Ints sizes) {
  return values(sizes, 0.3);
}
at::Tensor units(Ints sizes) {
  return at::sin(counting_values(sizes) * 1.3 + 0.1) * 0.4 + 0.5;
}
at::Tensor indices(Ints sizes, std::int64_t limit) {
  return (counting_values(sizes) * 5 + 2).to(at::kLong).remainder(limit);
}
at::Tensor mask(Ints sizes) {
  return counting_values(sizes).remainder(3) == 0;
}

c10::List<at::Tensor> tensor_list(std::initializer_list<at::Tensor> tensors) {
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : tensors) {
    list.push_back(tensor);
  }
  return list;
}

c10::List<std::optional<at::Tensor>> index_list(std::initializer_list<at::Tensor> tensors) {
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& tensor : tensors) {
    list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  return list;
}

RuleCase make_case(const std::string& op, std::vector<c10::IValue> arguments) {
  const std::string full = op.find("::") == std::string::npos ? "aten::" + op : op;
  const auto dot = full.find('.');
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      full.substr(0, dot).c_str(), dot == std::string::npos ? "" : full.substr(dot + 1).c_str());
  const auto& schema = handle.schema().arguments();
  for (std::size_t i = arguments.size(); i < schema.size(); ++i) {
    arguments.push_back(schema[i].default_value().value_or(c10::IValue()));
  }
  return {full, [arguments = std::move(arguments)] {
            std::vector<c10::IValue> copies;
            for (const auto& value : arguments) {
              copies.push_back(cloned(value));
            }
            return copies;
          }};
}

}  // namespace tessera::testing
