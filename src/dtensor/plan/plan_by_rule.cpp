// Turns a sharding rule into a CallPlan. core makes the decision (propagate); this file converts it
// to redistribution steps for each input, local sizes for arguments, and layouts for results. The
// result depends only on the call's cache key and on this rank's coordinate.

#include "plan/call_plan.h"

#include <algorithm>
#include <utility>

#include "operators/operator_info.h"
#include "redistribute/redistribute.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/detail/layout_math.h"

namespace tessera::detail {
namespace {

using Values = std::span<const c10::IValue>;

// Rules read bools, integers and doubles, but no complex numbers.
bool is_complex_number(const c10::IValue& value) {
  return value.isComplexDouble();
}

/// Removes reductions from the rule that the element types do not support: products and orderings
/// of complex numbers, and sums of booleans. Dimensions that would need such a reduction must not
/// be sharded.
void keep_irreducible_whole(ShardingRule& rule, const std::vector<at::Tensor>& tensors,
                            Values arguments) {
  const bool complex =
      std::ranges::any_of(tensors, [](const at::Tensor& t) { return t.is_complex(); }) ||
      std::ranges::any_of(arguments, is_complex_number);
  const bool booleans = std::ranges::any_of(rule.additive, [&](int input) {
    return tensors[static_cast<std::size_t>(input)].scalar_type() == at::kBool;
  });
  for (ShardingRule::Factor& factor : rule.factors) {
    const bool refused = (complex && factor.reduction == ReduceOp::kProduct) ||
                         (booleans && factor.reduction == ReduceOp::kSum);
    if (refused) {
      factor.reduction.reset();
    }
  }
  if (complex) {
    std::erase_if(rule.linear, [](const ShardingRule::Linear& linear) {
      return !is_reducible(at::kComplexDouble, linear.op);
    });
  }
}

/// Whether the operator rounds values to a written integer or boolean type, so that rounded terms
/// have a different sum: the type of some tensor cannot be cast safely to the written type.
bool rounds(const OperatorInfo& info, const BoundCall& bound) {
  return std::ranges::any_of(written_inputs(info, bound), [&](std::size_t input) {
    const c10::ScalarType type = bound.tensors[input].scalar_type();
    return c10::isIntegralType(type, /*includeBool=*/true) &&
           std::ranges::any_of(bound.tensors, [&](const at::Tensor& tensor) {
             return c10::promoteTypes(type, tensor.scalar_type()) != type;
           });
  });
}

/// Whether an argument is a number by which the terms of a sum must not be multiplied or divided
/// one by one: infinity times terms of both signs would be NaN.
bool scales_to_infinity(const OperatorInfo& info, Values arguments) {
  if (info.traits.has(Trait::kNumberBesideSum)) {
    return false;
  }
  const bool divides = info.traits.has(Trait::kDivides);
  const auto is_bad = [divides](const c10::IValue& value) {
    const NumberType type = value.isTensor() && value.toTensor().defined()
                                ? number_type(value.toTensor())
                                : number_type(value);
    const bool zero = type == NumberType::kZero || type == NumberType::kZeroInteger;
    return type == NumberType::kNotFinite || type == NumberType::kNotFiniteOther ||
           (divides && zero);
  };
  return std::ranges::any_of(arguments, [&](const c10::IValue& argument) {
    return argument.isList() && !argument.isTensorList()
               ? std::ranges::any_of(argument.toListRef(), is_bad)
               : is_bad(argument);
  });
}

void reduce_sums_first(ShardingRule& rule) {
  std::erase_if(rule.linear, [](const ShardingRule::Linear& linear) {
    return linear.op == ReduceOp::kSum || linear.op == ReduceOp::kAvg;
  });
}

/// The name under which the library has registered the operator of a local call.
std::string_view name_of(ShardingRule::LocalCall::PartOperator part) {
  const bool embeds = part == ShardingRule::LocalCall::PartOperator::kEmbeddingRows;
  return embeds ? "tessera_local::embedding_rows" : "tessera_local::gather_part";
}

CallPlan::LocalCall local_call_of(const ShardingRule::LocalCall& call) {
  const auto* part = std::get_if<ShardingRule::LocalCall::PartOperator>(&call.op);
  return {find_operator(part != nullptr ? name_of(*part) : std::get<std::string_view>(call.op)),
          call.args, call.scale};
}

void set_offsets(CallPlan& plan, const ShardingRule& rule) {
  for (const auto& [argument, input, dim] : rule.offset_arguments) {
    const CallPlan::Input& taken = plan.inputs[static_cast<std::size_t>(input)];
    const std::int64_t size = taken.spec->sizes[static_cast<std::size_t>(dim)];
    const auto indices =
        global_indices(*taken.layout(), dim, size, plan.replicated.mesh.coordinate());
    plan.local_call->arguments[static_cast<std::size_t>(argument)] =
        // A rank without a part uses 0, which is never read.
        indices.empty() ? std::int64_t{0} : indices.front();
  }
}

/// Sets the arguments that describe which elements of an input this rank has. Like local sizes,
/// each is stored in two forms (see rewrite_sizes).
void set_places(CallPlan& plan, const ShardingRule& rule) {
  for (const auto& [argument, input] : rule.place_arguments) {
    const CallPlan::Input& taken = plan.inputs[static_cast<std::size_t>(input)];
    const LayoutPtr layout = taken.layout();
    if (layout->is_replicated()) {
      continue;
    }
    const auto& sizes = taken.spec->sizes;
    const auto boxes = owned_boxes(*layout, sizes, plan.replicated.mesh.coordinate());
    const auto place = flat_place({sizes, boxes});
    plan.rewritten.push_back({argument, place, place});
  }
}

/// Replaces global sizes by local sizes. If a rule has a local call, its size arguments are those
/// of the local call; the operator itself then runs only if its sizes need no change.
void rewrite_sizes(CallPlan& plan, const OperatorInfo& info, const ShardingRule& rule,
                   Values arguments) {
  if (rule.local_call && !plan.local_call) {
    return;
  }
  for (const auto& [argument, output, dim, times] : rule.size_arguments) {
    const CallPlan::Output& out = plan.outputs[static_cast<std::size_t>(output)];
    const auto sizes = local_sizes({plan.replicated.mesh, out.layout}, out.sizes);
    Argument value = sizes;
    if (dim >= 0) {
      value = times * sizes[static_cast<std::size_t>(dim)];
    }
    if (plan.local_call) {
      plan.local_call->arguments[static_cast<std::size_t>(argument)] = value;
      continue;
    }
    if (dim >= 0) {
      plan.rewritten.push_back({argument, std::get<std::int64_t>(value), std::nullopt});
      continue;
    }
    // Local sizes are stored in two forms: as a value for the stack, and as a list that an unboxed
    // kernel borrows.
    plan.rewritten.push_back({argument, sizes, sizes});
    // Strides are replaced too, because local sizes with global strides would describe memory with
    // gaps.
    if (info.stride == argument + 1) {
      const auto strides = strides_in_order_of(
          sizes, arguments[static_cast<std::size_t>(info.stride)].toIntVector());
      plan.rewritten.push_back({info.stride, strides, strides});
    }
  }
}

/// Views have the strides of a view of the whole tensor. If the number of results differs from the
/// rule's outputs, the plan uses the order of the local strides.
void add_view_strides(CallPlan& plan, GlobalStrides strides) {
  if (!strides || strides->size() != plan.outputs.size()) {
    return;
  }
  for (std::size_t o = 0; o < strides->size(); ++o) {
    plan.outputs[o].strides = std::move((*strides)[o]);
  }
}

/// Whether output number `o` is a new tensor. Outputs after the returned ones are written
/// arguments.
bool is_new(const OperatorInfo& info, std::size_t o) {
  const bool list = info.returns.size() == 1;
  return (list || o < info.returns.size()) && info.returns[list ? 0 : o].written < 0;
}

/// Makes an output contiguous if ranks might not agree on its strides, because some rank's part is
/// too thin to determine the order of dimensions in memory.
void agree_on_strides(CallPlan& plan, const OperatorInfo& info) {
  const auto tells = [](const CallPlan::Input& input) {
    return shards_agree_on_stride_order(*input.layout(), input.spec->sizes);
  };
  // Whether the inputs determine the order; computed only if an output needs it.
  std::optional<bool> inputs_tell;
  for (std::size_t o = 0; o < plan.outputs.size(); ++o) {
    CallPlan::Output& output = plan.outputs[o];
    if (output.layout == nullptr || output.strides || !is_new(info, o)) {
      continue;
    }
    if (!inputs_tell) {
      inputs_tell = std::ranges::all_of(plan.inputs, tells);
    }
    output.contiguous =
        !*inputs_tell || !shards_agree_on_stride_order(*output.layout, output.sizes);
  }
}

}  // namespace

std::vector<std::size_t> written_inputs(const OperatorInfo& info, const BoundCall& bound) {
  std::vector<std::size_t> inputs;
  for (const int argument : info.written) {
    for (const TensorRef& ref : bound.call.tensor_list(static_cast<std::size_t>(argument))) {
      if (ref.index >= 0) {
        inputs.push_back(static_cast<std::size_t>(ref.index));
      }
    }
  }
  return inputs;
}

std::optional<ShardingRule> rule_of_call(const OperatorInfo& info, const BoundCall& bound,
                                         Values arguments) {
  // A rule reads only real numbers, so a call with complex numbers has no rule.
  const bool unreadable =
      info.rule.reads_numbers() && std::ranges::any_of(arguments, is_complex_number);
  if (!info.rule || unreadable) {
    return std::nullopt;
  }
  std::optional<ShardingRule> rule = info.rule(bound.call);
  if (!rule) {
    return std::nullopt;
  }
  keep_irreducible_whole(*rule, bound.tensors, arguments);
  if (rounds(info, bound)) {
    rule->linear.clear();
  }
  if (scales_to_infinity(info, arguments)) {
    reduce_sums_first(*rule);
  }
  return rule;
}

/// Sets the target even if no step is needed, because outputs are planned for `target`.
void bring_to(CallPlan& plan, CallPlan::Input& input, LayoutPtr target) {
  if (target == nullptr || target == input.spec->sharding.layout) {
    return;
  }
  input.target = target;
  RedistributionPlanPtr steps = plan_for(input.spec, target);
  // Layouts that differ only along mesh dimensions of size 1 have equal local tensors.
  const bool same = std::ranges::all_of(
      steps->steps, [](const Step& step) { return step.kind == StepKind::kRelabel; });
  if (same) {
    return;
  }
  plan.moves = plan.moves || std::ranges::any_of(steps->steps, communicates);
  input.plan = std::move(steps);
}

/// For each written tensor: the layout of the new value that the operator writes, unless it is the
/// tensor's own layout and the tensor was not redistributed. An operator that changes shapes is
/// skipped: its result replaces the local tensor (ResultWrapper::give_back).
void plan_writes(CallPlan& plan, const OperatorInfo& info, const BoundCall& bound,
                 std::span<const ShardingRule::Inplace> inplace) {
  if (info.changes_shape) {
    return;
  }
  std::vector<std::size_t> written = written_inputs(info, bound);
  for (const auto& pair : inplace) {
    const auto number = static_cast<std::size_t>(pair.input);
    if (std::ranges::find(written, number) == written.end()) {
      plan.inputs[number].updated = true;
      written.push_back(number);
    }
  }
  for (const std::size_t number : written) {
    CallPlan::Input& input = plan.inputs[number];
    LayoutPtr left = input.layout();
    for (const auto& pair : inplace) {
      if (static_cast<std::size_t>(pair.input) == number) {
        left = plan.outputs[static_cast<std::size_t>(pair.output)].layout;
      }
    }
    // Without a rule the operator may also resize the tensor, which is detected only after the
    // call.
    if (input.plan || left != input.spec->sharding.layout || !plan.has_rule) {
      input.written = left;
    }
  }
}

void plan_by_rule(CallPlan& plan, const OperatorInfo& info, const ShardingRule& rule,
                  const BoundCall& bound, Values arguments, GlobalStrides view_strides) {
  std::vector<LayoutPtr> layouts;
  for (const at::Tensor& tensor : bound.tensors) {
    const DistributedTensorImpl* impl = as_distributed(tensor);
    layouts.push_back(impl != nullptr ? impl->spec()->sharding.layout : nullptr);
  }
  Propagation decided = propagate(rule, bound.call, layouts);
  plan.has_rule = true;
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
    bring_to(plan, plan.inputs[i], decided.inputs[i]);
  }
  for (std::size_t o = 0; o < decided.outputs.size(); ++o) {
    plan.outputs.push_back({decided.outputs[o], std::move(decided.output_sizes[o]), {}, nullptr});
  }
  // The order matters: writes need the layouts of the outputs, arguments are set for the local
  // call, and strides are chosen only for outputs that are not views.
  plan_writes(plan, info, bound, rule.inplace);
  if (decided.use_local_call) {
    plan.local_call = local_call_of(*rule.local_call);
    set_offsets(plan, rule);
  }
  rewrite_sizes(plan, info, rule, arguments);
  set_places(plan, rule);
  add_view_strides(plan, std::move(view_strides));
  agree_on_strides(plan, info);
}

}  // namespace tessera::detail
