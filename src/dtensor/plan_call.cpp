#include <ATen/core/dispatch/Dispatcher.h>
#include <algorithm>

#include "agreement.h"
#include "bound_call.h"
#include "call_key.h"
#include "call_plan.h"
#include "distributed_impl.h"
#include "expanded.h"
#include "reducible.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "view_geometry.h"

namespace tessera::detail {
namespace {

/// The mesh that all distributed tensors of a call are on.
const DeviceMesh& common_mesh(const OperatorInfo& info, const std::vector<at::Tensor>& tensors) {
  const DeviceMesh* mesh = nullptr;
  for (const auto& tensor : tensors) {
    const auto* impl = as_distributed(tensor);
    if (impl == nullptr) continue;
    const auto& own = impl->spec()->sharding.mesh;
    if (mesh == nullptr) mesh = &own;
    TESSERA_CHECK(own == *mesh, info.name, " of tensors on different meshes, ", to_string(*mesh),
                  " and ", to_string(own),
                  ": bring them to one with redistribute(mesh, placements)");
  }
  return *mesh;
}

CallPlan::Input input_of(const at::Tensor& tensor, const ShardingSpec& replicated) {
  if (const auto* impl = as_distributed(tensor)) return {impl->spec(), nullptr, nullptr};
  const auto layout =
      Layout::replicated(replicated.layout->mesh_sizes(), static_cast<int>(tensor.dim()));
  return {intern_spec({{replicated.mesh, layout},
                       tensor.sizes().vec(),
                       strides_in_order_of(tensor.sizes(), tensor.strides()),
                       tensor.scalar_type()}),
          nullptr, nullptr};
}

void bring_to(CallPlan& plan, CallPlan::Input& input, LayoutPtr target) {
  if (target == nullptr || target == input.spec->sharding.layout) return;
  input.target = target;
  auto steps = plan_for(input.spec, target);
  // On mesh dimensions of size 1 the same local tensor will do.
  const bool same = std::all_of(steps->steps.begin(), steps->steps.end(),
                                [](auto& step) { return step.kind == StepKind::kRelabel; });
  if (same) return;
  input.plan = std::move(steps);
  plan.moves =
      plan.moves || std::any_of(input.plan->steps.begin(), input.plan->steps.end(), communicates);
}

/// No rule: gather everything.
void plan_default(CallPlan& plan) {
  for (auto& input : plan.inputs) {
    bring_to(plan, input,
             Layout::replicated(plan.replicated.layout->mesh_sizes(),
                                static_cast<int>(input.spec->sizes.size())));
  }
}

std::vector<std::int64_t> local_sizes_of(const CallPlan& plan, int output) {
  const auto& out = plan.outputs[static_cast<std::size_t>(output)];
  return local_sizes({plan.replicated.mesh, out.layout}, out.sizes);
}

/// Arguments that speak of global sizes get their local values.
void rewrite_sizes(CallPlan& plan, const OperatorInfo& info, const ShardingRule& rule,
                   std::span<const c10::IValue> arguments) {
  for (const auto& [argument, output, dim] : rule.size_arguments) {
    const auto sizes = local_sizes_of(plan, output);
    Argument value = sizes;
    if (dim >= 0) value = sizes[static_cast<std::size_t>(dim)];
    if (plan.local_call) {
      plan.local_call->arguments[static_cast<std::size_t>(argument)] = value;
      continue;
    }
    if (dim >= 0) {
      plan.rewritten.push_back({argument, sizes[static_cast<std::size_t>(dim)], std::nullopt});
      continue;
    }
    plan.rewritten.push_back({argument, sizes, sizes});
    if (info.stride == argument + 1) {
      const auto strides = strides_in_order_of(
          sizes, arguments[static_cast<std::size_t>(info.stride)].toIntVector());
      plan.rewritten.push_back({info.stride, strides, strides});
    }
  }
}

/// Arguments of a local call that say where this rank's part of an input begins.
void set_offsets(CallPlan& plan, const ShardingRule& rule) {
  for (const auto& [argument, input, dim] : rule.offset_arguments) {
    const auto& taken = plan.inputs[static_cast<std::size_t>(input)];
    const auto& spec = *taken.spec;
    const auto& layout = taken.target != nullptr ? *taken.target : *spec.sharding.layout;
    const auto indices = global_indices(layout, dim, spec.sizes[static_cast<std::size_t>(dim)],
                                        plan.replicated.mesh.coordinate());
    plan.local_call->arguments[static_cast<std::size_t>(argument)] =
        indices.empty() ? std::int64_t{0} : indices.front();
  }
}

CallPlan::LocalCall local_call_of(const ShardingRule::LocalCall& call) {
  const std::string full(call.op);
  const auto dot = full.find('.');
  const auto name = full.substr(0, dot);
  const auto overload = dot == std::string::npos ? std::string() : full.substr(dot + 1);
  return {c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), call.args,
          call.scale};
}

/// The tensors of the arguments that the operator writes to.
std::vector<std::size_t> written_inputs(const OperatorInfo& info, const BoundCall& bound) {
  std::vector<std::size_t> inputs;
  for (int argument : info.written) {
    for (const auto& ref : bound.call.tensor_list(static_cast<std::size_t>(argument))) {
      if (ref.index >= 0) inputs.push_back(static_cast<std::size_t>(ref.index));
    }
  }
  return inputs;
}

/// Finds out which written tensors get their value from elsewhere.
void plan_writes(CallPlan& plan, const OperatorInfo& info, const BoundCall& bound,
                 std::span<const ShardingRule::Inplace> inplace) {
  if (info.changes_shape) return;
  for (const auto number : written_inputs(info, bound)) {
    auto& input = plan.inputs[number];
    const auto own = input.spec->sharding.layout;
    auto left = input.target != nullptr ? input.target : own;
    for (const auto& pair : inplace) {
      if (static_cast<std::size_t>(pair.input) == number) {
        left = plan.outputs[static_cast<std::size_t>(pair.output)].layout;
      }
    }
    // Without a rule the operator may also resize it, which is then found out.
    if (input.plan || left != own || !plan.has_rule) input.written = left;
  }
}

void plan_by_rule(CallPlan& plan, const OperatorInfo& info, const ShardingRule& rule,
                  const BoundCall& bound, std::span<const c10::IValue> arguments) {
  std::vector<LayoutPtr> layouts;
  for (const auto& tensor : bound.tensors) {
    const auto* impl = as_distributed(tensor);
    layouts.push_back(impl != nullptr ? impl->spec()->sharding.layout : nullptr);
  }
  auto decided = propagate(rule, bound.call, layouts);
  plan.has_rule = true;
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
    bring_to(plan, plan.inputs[i], decided.inputs[i]);
  }
  for (std::size_t o = 0; o < decided.outputs.size(); ++o) {
    plan.outputs.push_back({decided.outputs[o], std::move(decided.output_sizes[o]), {}, nullptr});
  }
  plan_writes(plan, info, bound, rule.inplace);
  if (decided.use_local_call) {
    plan.local_call = local_call_of(*rule.local_call);
    set_offsets(plan, rule);
  }
  rewrite_sizes(plan, info, rule, arguments);
}

/// Views keep the strides that they would have on the whole tensor.
void add_view_strides(CallPlan& plan, std::vector<std::vector<std::int64_t>> strides) {
  if (strides.size() != plan.outputs.size()) return;
  for (std::size_t o = 0; o < strides.size(); ++o) plan.outputs[o].strides = std::move(strides[o]);
}

/// Takes a form of the operator that sends less than bringing its inputs to where they are wanted.
void plan_form(CallPlan& plan, const BoundCall& bound) {
  if (!plan.moves || plan.random) return;
  double bytes = 0;
  for (const auto& input : plan.inputs) {
    if (input.plan) bytes += static_cast<double>(input.plan->bytes());
  }
  const auto choice = choose_form(bound, bytes);
  plan.form = choice.form;
  if (choice.form != nullptr) plan.moves = choice.communicates;
}

/// Takes reductions out of the rule that the elements do not have: products and orders of complex
/// numbers, and sums to which booleans are added. What would be reduced so must be whole.
void keep_irreducible_whole(ShardingRule& rule, const std::vector<at::Tensor>& tensors,
                            std::span<const c10::IValue> arguments) {
  const bool complex =
      std::any_of(tensors.begin(), tensors.end(), [](auto& t) { return t.is_complex(); }) ||
      std::any_of(arguments.begin(), arguments.end(), [](auto& a) { return a.isComplexDouble(); });
  const bool booleans = std::any_of(rule.additive.begin(), rule.additive.end(), [&](int input) {
    return tensors[static_cast<std::size_t>(input)].scalar_type() == at::kBool;
  });
  for (auto& factor : rule.factors) {
    const bool refused = (complex && factor.reduction == ReduceOp::kProduct) ||
                         (booleans && factor.reduction == ReduceOp::kSum);
    if (refused) factor.reduction.reset();
  }
  if (!complex) return;
  std::erase_if(rule.linear, [](auto& law) { return !is_reducible(at::kComplexDouble, law.op); });
}

/// Whether the operator writes to a tensor of which several positions are one in memory.
bool writes_expanded(const OperatorInfo& info, const BoundCall& bound) {
  const auto inputs = written_inputs(info, bound);
  return std::any_of(inputs.begin(), inputs.end(),
                     [&](std::size_t input) { return is_expanded(bound.tensors[input]); });
}

/// Whether values are converted to integers or booleans that are written: terms of a sum, rounded,
/// have another sum.
bool rounds(const OperatorInfo& info, const BoundCall& bound) {
  const auto inputs = written_inputs(info, bound);
  return std::any_of(inputs.begin(), inputs.end(), [&](std::size_t input) {
    const auto type = bound.tensors[input].scalar_type();
    return c10::isIntegralType(type, /*includeBool=*/true) &&
           std::any_of(bound.tensors.begin(), bound.tensors.end(), [&](auto& tensor) {
             return c10::promoteTypes(type, tensor.scalar_type()) != type;
           });
  });
}

/// Whether ranks are to ask each other whether the operator has thrown for the values of a part, or
/// because it writes to one place twice: not on a rank that has one position there, or none.
bool fails_together(const CallPlan& plan, const OperatorInfo& info, const BoundCall& bound) {
  const bool may_fail = (info.fails_by_part && checks_calls()) || writes_expanded(info, bound);
  return may_fail && !bound.tensors.front().is_meta() &&
         std::any_of(plan.inputs.begin(), plan.inputs.end(), is_split);
}

/// Whether the operator only has to be run on the local tensors, and its result, if any, wrapped.
bool is_direct(const CallPlan& plan, const OperatorInfo& info) {
  if (plan.random || plan.mixes_plain || plan.local_call || info.changes_shape) return false;
  if (plan.together) return false;
  const bool one_result = info.returns.size() == 1 && plan.outputs.size() == 1;
  const bool new_results = std::all_of(info.returns.begin(), info.returns.end(), [](auto& result) {
    return result.is_tensor && result.written < 0;
  });
  if (!one_result && !new_results) return false;
  const bool lists = std::all_of(plan.rewritten.begin(), plan.rewritten.end(),
                                 [](auto& rewritten) { return rewritten.sizes.has_value(); });
  return lists && std::none_of(plan.inputs.begin(), plan.inputs.end(),
                               [](auto& input) { return input.plan || input.written; });
}

/// Rules read real numbers; a call with a complex one has no rule where they are read.
bool rule_reads_complex(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  return info.rule.reads_numbers() && std::any_of(arguments.begin(), arguments.end(),
                                                  [](auto& a) { return a.isComplexDouble(); });
}

/// Whether an argument is a number by which the terms of a sum cannot be multiplied, or divided,
/// one by one: infinity times terms of both signs would be no number. Not where it only stands
/// beside the sum.
bool scales_to_infinity(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  using Number = CallKey::Number;
  if (info.name.starts_with("aten::where") || info.name.starts_with("aten::masked_fill")) {
    return false;
  }
  const bool divides = info.name.starts_with("aten::div") ||
                       info.name.starts_with("aten::true_divide") ||
                       info.name.starts_with("aten::_foreach_div");
  const auto is_bad = [divides](const c10::IValue& value) {
    const auto number = value.isTensor() && value.toTensor().defined()
                            ? CallKey::number_of(value.toTensor())
                            : CallKey::number_of(value);
    const bool zero = number == Number::kZero || number == Number::kZeroInteger;
    return number == Number::kNotFinite || number == Number::kNotFiniteOther || (divides && zero);
  };
  return std::ranges::any_of(arguments, [&](const c10::IValue& argument) {
    return argument.isList() && !argument.isTensorList()
               ? std::ranges::any_of(argument.toListRef(), is_bad)
               : is_bad(argument);
  });
}

/// What such a number multiplies is reduced first.
void reduce_sums_first(ShardingRule& rule) {
  std::erase_if(rule.linear, [](const ShardingRule::Linear& linear) {
    return linear.op == ReduceOp::kSum || linear.op == ReduceOp::kAvg;
  });
}

}  // namespace

CallPlan plan_call(const c10::OperatorHandle& op, const OperatorInfo& info,
                   std::span<const c10::IValue> arguments) {
  const auto bound = bind_call(info, arguments);
  CallPlan plan;
  const auto& mesh = common_mesh(info, bound.tensors);
  plan.replicated = {mesh, Layout::replicated(mesh.shape().sizes(), 0)};
  for (const auto& tensor : bound.tensors) {
    if (as_distributed(tensor) == nullptr && tensor.numel() > 1) plan.mixes_plain = true;
    plan.inputs.push_back(input_of(tensor, plan.replicated));
  }
  plan.compares_plain = plan.mixes_plain && checks_calls() && !bound.tensors.front().is_meta();
  std::optional<std::vector<std::vector<std::int64_t>>> strides;
  const bool reshapes = info.changes_shape && info.rule;
  if (info.viewed >= 0 || reshapes) strides = view_strides(op, arguments);

  auto rule =
      info.rule && !rule_reads_complex(info, arguments) ? info.rule(bound.call) : std::nullopt;
  // The operator on each shard would draw the same numbers for all of them: it is run as a whole.
  plan.random = rule ? rule->random : info.draws_random;
  if (plan.random) rule.reset();
  if (rule) keep_irreducible_whole(*rule, bound.tensors, arguments);
  if (rule && rounds(info, bound)) rule->linear.clear();
  if (!rule) {
    plan_default(plan);
    plan_writes(plan, info, bound, {});
    plan_form(plan, bound);
    return plan;
  }
  if (scales_to_infinity(info, arguments)) reduce_sums_first(*rule);
  plan_by_rule(plan, info, *rule, bound, arguments);
  plan_form(plan, bound);
  if (strides) add_view_strides(plan, std::move(*strides));
  plan.together = fails_together(plan, info, bound);
  plan.direct = is_direct(plan, info);
  return plan;
}

}  // namespace tessera::detail
