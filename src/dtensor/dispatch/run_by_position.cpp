#include "dispatch/run_by_position.h"

#include <vector>

#include "dispatch/fallback.h"

namespace tessera::detail {
namespace {

/// An argument of the call of one position: its element of a list, or of a tensor of numbers. Lists
/// of one element keep the operator and its schema: no operator on single tensors is needed.
c10::IValue element_of(const c10::IValue& value, std::size_t position, std::size_t count) {
  if (value.isTensor() && value.toTensor().dim() == 1) {
    return value.toTensor().narrow(0, static_cast<std::int64_t>(position), 1);
  }
  if (!value.isList() || value.toListRef().size() != count) {
    return value;
  }
  c10::List<c10::IValue> one(value.toList().elementType());
  one.push_back(value.toListRef()[position]);
  return one;
}

}  // namespace

/// Takes the arguments off the stack first: every position is a separate call, with its own key,
/// plan and stack.
void run_by_position(PlannedCall& call) {
  const auto given = call.arguments();
  const std::vector<c10::IValue> arguments(given.begin(), given.end());
  call.return_results({});
  const std::size_t count = arguments.front().toListRef().size();
  for (std::size_t position = 0; position < count; ++position) {
    torch::jit::Stack one;
    for (const c10::IValue& value : arguments) {
      one.push_back(element_of(value, position, count));
    }
    dispatch(call.op, one);
  }
}

}  // namespace tessera::detail
