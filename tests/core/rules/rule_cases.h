#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

namespace tessera::testing {

/// A call of a libtorch operator. arguments() returns new tensors at each call.
struct RuleCase {
  std::string op;  ///< for example "aten::add.Tensor"
  std::function<std::vector<c10::IValue>()> arguments;
};

using Ints = std::vector<std::int64_t>;

/// Return test tensors. reals(): values of both signs; units(): values in (0, 1); indices():
/// integers in [0, limit); mask(): booleans.
at::Tensor reals(Ints sizes);
at::Tensor units(Ints sizes);
at::Tensor indices(Ints sizes, std::int64_t limit);
at::Tensor mask(Ints sizes);

c10::List<at::Tensor> tensor_list(std::initializer_list<at::Tensor> tensors);
/// Returns a list of index tensors, as at::index() takes it. Undefined tensors become None.
c10::List<std::optional<at::Tensor>> index_list(std::initializer_list<at::Tensor> tensors);

/// Returns a test case of the libtorch operator `op`, without "aten::". Arguments that are not
/// given get the defaults of the operator's schema.
RuleCase make_case(const std::string& op, std::vector<c10::IValue> arguments);

template <class... Arguments>
RuleCase row(const std::string& op, Arguments&&... arguments) {
  return make_case(op, {c10::IValue(arguments)...});
}

std::vector<RuleCase> pointwise_cases();
std::vector<RuleCase> reduction_cases();
std::vector<RuleCase> view_cases();
std::vector<RuleCase> indexing_cases();
std::vector<RuleCase> network_cases();
std::vector<RuleCase> list_cases();
std::vector<RuleCase> fused_cases();

}  // namespace tessera::testing
