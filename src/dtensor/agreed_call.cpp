#include "agreed_call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "agreement.h"
#include "below_autograd.h"
#include "distributed_impl.h"

namespace tessera::detail {
namespace {

/// Collective where `argument` is a tensor that is spread out.
c10::IValue replicated(const c10::IValue& argument) {
  const auto* impl = argument.isTensor() && argument.toTensor().defined()
                         ? as_distributed(argument.toTensor())
                         : nullptr;
  if (impl == nullptr) return argument;
  const auto& spec = *impl->spec();
  const auto whole =
      Layout::replicated(spec.sharding.layout->mesh_sizes(), static_cast<int>(spec.sizes.size()));
  const BelowAutograd guard;
  return make_distributed(redistribute_local(impl->local(), impl->spec(), whole),
                          {spec.sharding.mesh, whole}, spec.sizes);
}

}  // namespace

bool may_fail_apart(const OperatorInfo& info, const CallPlan& plan,
                    std::span<const c10::IValue> arguments) {
  if (!info.fails_by_value || !plan.has_rule) return false;
  const auto checks = static_cast<std::size_t>(info.check_errors);
  if (info.check_errors >= 0 && !arguments[checks].toBool()) return false;
  const auto& tensor = arguments.front().toTensor();
  return !tensor.is_meta() && std::any_of(plan.inputs.begin(), plan.inputs.end(), is_split);
}

bool run_agreed(const c10::OperatorHandle& op, const OperatorInfo& info, CallPlan& plan,
                torch::jit::Stack& stack) {
  const auto first = stack.size() - info.arguments.size();
  std::vector<c10::IValue> arguments(stack.begin() + static_cast<std::ptrdiff_t>(first),
                                     stack.end());
  const auto mesh = plan.replicated.mesh;
  bool failed = false;
  try {
    run_call(op, info, plan, stack);
  } catch (const c10::Error&) {  // the operator's own: a peer's failure is an Error, and goes on
    failed = true;
  }
  if (!any_rank(mesh, failed)) return true;
  stack.resize(first);
  for (const auto& argument : arguments) stack.push_back(replicated(argument));
  return false;
}

}  // namespace tessera::detail
