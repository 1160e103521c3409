#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "operators/operator_info.h"
#include "plan/call_plan.h"
#include "redistribute/redistribute.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/internals/detail/tensors.h"
#include "views/views.h"

namespace tessera::detail {

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

// Makes a CallPlan from a sharding rule: propagate() of src/core chooses the layouts; this file
// adds redistribution steps and local sizes.

namespace {

using Values = std::span<const c10::IValue>;

/// The global strides of each result of a view operator; nullopt if the strides are unknown.
using GlobalStrides = std::optional<std::vector<std::vector<std::int64_t>>>;

bool is_complex_number(const c10::IValue& value) {
  return value.isComplexDouble();
}

/// Removes reductions that the dtypes do not support from the sharding rule: products, maxima and
/// minima of complex numbers, and sums of bools. The reduced dimension then cannot be sharded.
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

/// Whether the operator writes its result to an integer or bool tensor, which rounds the result.
/// The sum of rounded terms of a Partial sum would be wrong.
bool rounds(const OperatorInfo& info, const BoundCall& bound) {
  return std::ranges::any_of(written_inputs(info, bound), [&](std::size_t input) {
    const c10::ScalarType type = bound.tensors[input].scalar_type();
    return c10::isIntegralType(type, /*includeBool=*/true) &&
           std::ranges::any_of(bound.tensors, [&](const at::Tensor& tensor) {
             return c10::promoteTypes(type, tensor.scalar_type()) != type;
           });
  });
}

/// Whether a number argument is infinite or NaN, or a divisor is zero. Such a number must not scale
/// terms of a Partial sum: infinite terms could sum to NaN.
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
        // A rank with an empty shard passes 0; the operator does not use this 0.
        indices.empty() ? std::int64_t{0} : indices.front();
  }
}

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

/// Replaces global sizes by local sizes: in the arguments of the local call or, if the rule has no
/// local call, in the arguments of the called operator.
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
    plan.rewritten.push_back({argument, sizes, sizes});
    // Strides must fit the local sizes: global strides would describe memory with gaps.
    if (info.stride == argument + 1) {
      const auto strides = strides_in_order_of(
          sizes, arguments[static_cast<std::size_t>(info.stride)].toIntVector());
      plan.rewritten.push_back({info.stride, strides, strides});
    }
  }
}

/// Gives the outputs of a view operator the strides of the global results, if these strides are
/// known.
void add_view_strides(CallPlan& plan, GlobalStrides strides) {
  if (!strides || strides->size() != plan.outputs.size()) {
    return;
  }
  for (std::size_t o = 0; o < strides->size(); ++o) {
    plan.outputs[o].strides = std::move((*strides)[o]);
  }
}

/// Whether output `o` is a new tensor that the operator returns. The outputs after the returned
/// tensors describe arguments that the operator writes.
bool is_new(const OperatorInfo& info, std::size_t o) {
  const bool list = info.returns.size() == 1;
  return (list || o < info.returns.size()) && info.returns[list ? 0 : o].written < 0;
}

/// Makes an output contiguous if ranks could see different orders of its dimensions in memory: a
/// dimension of local size 0 or 1 can have any stride.
void agree_on_strides(CallPlan& plan, const OperatorInfo& info) {
  const auto tells = [](const CallPlan::Input& input) {
    return shards_agree_on_stride_order(*input.layout(), input.spec->sizes);
  };
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

/// Returns the sharding rule of a call, or nullopt. Forbids Partial inputs whose terms would be
/// rounded or scaled by infinity, and unsupported reductions.
std::optional<ShardingRule> rule_of_call(const OperatorInfo& info, const BoundCall& bound,
                                         Values arguments) {
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
    std::erase_if(rule->linear, [](const ShardingRule::Linear& linear) {
      return linear.op == ReduceOp::kSum || linear.op == ReduceOp::kAvg;
    });
  }
  return rule;
}

void bring_to(CallPlan& plan, CallPlan::Input& input, LayoutPtr target) {
  if (target == nullptr || target == input.spec->sharding.layout) {
    return;
  }
  input.target = target;
  RedistributionPlanPtr steps = plan_for(input.spec, target);
  // If layouts differ only on mesh dimensions of size 1, nothing is redistributed.
  const bool same = std::ranges::all_of(
      steps->steps, [](const Step& step) { return step.kind == StepKind::kRelabel; });
  if (same) {
    return;
  }
  plan.moves = plan.moves || std::ranges::any_of(steps->steps, communicates);
  input.plan = std::move(steps);
}

/// Sets the layouts of new values that are copied to the caller's tensors. An operator that changes
/// shapes replaces the caller's local tensor instead.
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
    // An operator without a sharding rule may resize the tensor that it writes, so the tensor's new
    // value is always copied back.
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
  // The order of these calls matters: plan_writes() reads the layouts of outputs, rewrite_sizes()
  // needs the local call, and agree_on_strides() skips outputs whose strides are set.
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

// plan_call() makes a call plan. Planning does not communicate, and reads no tensor values except
// wrapped numbers (2.0 in at::mul(x, 2.0)), so all ranks make the same plan.

bool holds_distributed(const c10::IValue& value) {
  if (value.isTensor()) {
    return tessera::is_distributed(value.toTensor());
  }
  return value.isList() && std::ranges::any_of(value.toListRef(), holds_distributed);
}

bool any_distributed(const OperatorInfo& info, Values arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool tensors =
        info.arguments[i] == OperatorInfo::ArgumentKind::kTensor || info.is_list(i);
    if (tensors && holds_distributed(arguments[i])) {
      return true;
    }
  }
  return false;
}

const DeviceMesh& common_mesh(const OperatorInfo& info, const std::vector<at::Tensor>& tensors) {
  const DeviceMesh* mesh = nullptr;
  for (const at::Tensor& tensor : tensors) {
    const DistributedTensorImpl* impl = as_distributed(tensor);
    if (impl == nullptr) {
      continue;
    }
    const DeviceMesh& own = impl->spec()->sharding.mesh;
    if (mesh == nullptr) {
      mesh = &own;
    }
    if (own != *mesh) {
      const std::string remedy = remedy_of_calling(tensors);
      fail(info.name, " of tensors on different meshes, ", to_string(*mesh), " and ",
           to_string(own),
           "; put all tensors on one mesh (pass full_tensor() to distribute_tensor)",
           remedy.empty() ? "" : ", or " + remedy);
    }
  }
  return *mesh;
}

/// Makes the Input of one tensor. A plain tensor counts as replicated and dense, because a spec
/// cannot describe gaps in memory. check_policy() checks the replication.
CallPlan::Input input_of(const at::Tensor& tensor, const ShardingSpec& replicated) {
  if (const DistributedTensorImpl* impl = as_distributed(tensor)) {
    return {.spec = impl->spec(), .plan = nullptr, .detached = impl->detached_view() != nullptr};
  }
  const LayoutPtr layout =
      Layout::replicated(replicated.layout->mesh_sizes(), static_cast<int>(tensor.dim()));
  return {.spec = intern_spec({{replicated.mesh, layout},
                               tensor.sizes().vec(),
                               strides_in_order_of(tensor.sizes(), tensor.strides()),
                               tensor.scalar_type()}),
          .plan = nullptr};
}

/// Sets the mesh and the inputs of the call plan. A plain tensor with one element counts as a
/// replicated number; check_policy() compares such numbers between ranks.
void plan_inputs(CallPlan& plan, const OperatorInfo& info, const BoundCall& bound) {
  const DeviceMesh& mesh = common_mesh(info, bound.tensors);
  plan.replicated = {mesh, Layout::replicated(mesh.shape().sizes(), 0)};
  for (const at::Tensor& tensor : bound.tensors) {
    if (as_distributed(tensor) == nullptr) {
      const bool is_number = is_wrapped_number(tensor);
      plan.takes_plain = plan.takes_plain || !is_number;
      plan.mixes_plain = plan.mixes_plain || tensor.numel() > 1;
    }
    plan.inputs.push_back(input_of(tensor, plan.replicated));
  }
  plan.compares_plain = plan.takes_plain && checks_calls() && !bound.tensors.front().is_meta();
}

/// Redistributes all inputs to Replicate, for operators without a sharding rule and for random
/// operators that run on whole tensors.
void gather_inputs(CallPlan& plan) {
  for (CallPlan::Input& input : plan.inputs) {
    bring_to(plan, input,
             Layout::replicated(plan.replicated.layout->mesh_sizes(),
                                static_cast<int>(input.spec->sizes.size())));
  }
}

/// Selects the lowering (alternative implementation) of the operator if the lowering sends less
/// than the redistribution of the inputs, or if the operator exists to communicate.
void plan_form(CallPlan& plan, const OperatorInfo& info, const BoundCall& bound) {
  if (!plan.moves || plan.seeded) {
    return;
  }
  double bytes = 0;
  for (const CallPlan::Input& input : plan.inputs) {
    if (input.plan) {
      bytes += static_cast<double>(input.plan->bytes());
    }
  }
  const Lowering* lowering = lowering_of(info);
  const std::optional<double> own = lowering != nullptr ? lowering->bytes(bound) : std::nullopt;
  if (own && (lowering->own_collectives || *own < bytes)) {
    plan.lowering = lowering;
    plan.moves = !lowering->own_collectives && *own > 0;
  }
}

/// Whether the operator runs on a copy of the caller's local tensor.
bool is_copied(const CallPlan::Input& input) {
  return input.plan || input.written != nullptr || input.detached;
}

bool is_split(const CallPlan::Input& input) {
  return !input.layout()->is_replicated();
}

/// Whether UnboxedKernel::run suffices: the call only runs the operator on the local tensors and
/// wraps the results.
bool is_direct(const CallPlan& plan, const OperatorInfo& info) {
  if (plan.compares_plain || plan.local_call || info.changes_shape) {
    return false;
  }
  const bool one_result = info.returns.size() == 1 && plan.outputs.size() == 1;
  const bool new_results = std::ranges::all_of(
      info.returns, [](const auto& result) { return result.is_tensor && result.written < 0; });
  const bool lists_only = std::ranges::all_of(
      plan.rewritten, [](const auto& rewritten) { return rewritten.sizes.has_value(); });
  const bool as_they_are = std::ranges::none_of(plan.inputs, is_copied);
  const bool as_they_come = std::ranges::none_of(
      plan.outputs, [](const CallPlan::Output& output) { return output.contiguous; });
  return (one_result || new_results) && lists_only && as_they_are && as_they_come;
}

CallKind kind_of(const CallPlan& plan, const OperatorInfo& info, const BoundCall& bound) {
  if (plan.lowering != nullptr) {
    return CallKind::kLowering;
  }
  if (!plan.has_rule) {
    return CallKind::kLocal;
  }
  // An invalid index may exist on only some ranks, but all ranks must throw.
  if (!bound.tensors.front().is_meta() && std::ranges::any_of(plan.inputs, is_split) &&
      ((info.traits.has(Trait::kFailsByElement) && checks_calls()) ||
       std::ranges::any_of(written_inputs(info, bound), [&](std::size_t input) {
         return has_stride_zero(bound.tensors[input]);
       }))) {
    return CallKind::kFailTogether;
  }
  return is_direct(plan, info) ? CallKind::kDirect : CallKind::kLocal;
}

bool brings_generator(const OperatorInfo& info, Values arguments) {
  return info.generator >= 0 && !arguments[static_cast<std::size_t>(info.generator)].isNone();
}

/// Returns the kind of a random operator that draws by global element index. Returns nullopt for
/// other operators, and if the caller passes a generator.
std::optional<CallKind> kind_by_element(const OperatorInfo& info, Values arguments) {
  const bool dropout = info.traits.has(Trait::kNativeDropout);
  if (!dropout && !info.traits.has(Trait::kRandomInplace)) {
    return std::nullopt;
  }
  if (brings_generator(info, arguments)) {
    return std::nullopt;
  }
  return dropout ? CallKind::kNativeDropout : CallKind::kRandomInplace;
}

/// Plans a random operator that draws by global element index. has_rule is set so that no input is
/// gathered. Dropout first reduces a Partial tensor: dropout of terms is not dropout of their sum.
void plan_by_element(CallPlan& plan, CallKind kind) {
  plan.kind = kind;
  plan.has_rule = true;
  if (kind == CallKind::kNativeDropout) {
    CallPlan::Input& x = plan.inputs.front();
    bring_to(plan, x, gradient_layout(x.spec->sharding.layout));
  }
}

}  // namespace

CallPlan plan_call(const c10::OperatorHandle& op, const OperatorInfo& info, Values arguments) {
  CallPlan plan;
  if (!any_distributed(info, arguments)) {
    plan.kind = CallKind::kPlain;
    return plan;
  }
  // A decomposed operator has no plan of its own. The operators that it calls reach kDistributedKey
  // one by one and get their own plans.
  if (info.decomposes) {
    plan.kind = CallKind::kDecomposed;
    return plan;
  }
  const BoundCall bound = bind_call(info, arguments);
  plan_inputs(plan, info, bound);
  if (const auto kind = kind_by_element(info, arguments)) {
    plan_by_element(plan, *kind);
    return plan;
  }
  // view_strides() runs before rule_of_call(), to throw libtorch's own errors for wrong sizes.
  GlobalStrides strides;
  if (info.viewed >= 0 || (info.changes_shape && info.rule)) {
    strides = view_strides(op, arguments);
  }
  std::optional<ShardingRule> rule = rule_of_call(info, bound, arguments);
  // A random operator that does not draw by global index runs on whole tensors on every rank. On
  // shards, all ranks would draw the same numbers for different elements.
  const bool random = rule ? rule->random : info.draws_random;
  plan.seeded = random && !brings_generator(info, arguments);
  if (rule && !random) {
    plan_by_rule(plan, info, *rule, bound, arguments, std::move(strides));
  } else {
    gather_inputs(plan);
    plan_writes(plan, info, bound, {});
  }
  plan_form(plan, info, bound);
  // A StrictScope permits a call that requests a single value (item()), but not a gather.
  plan.asked_for = info.traits.has(Trait::kReadsOneValue);
  plan.kind = kind_of(plan, info, bound);
  return plan;
}

// Local implementations of aten::embedding and aten::gather with a sharded indexed dimension. Each
// rank selects from its shard; the sum over ranks is the result.

namespace {

/// Throws for an index outside of the table, which would otherwise silently give zeros.
void check_range(const at::Tensor& indices, std::int64_t rows) {
  if (indices.numel() == 0 || indices.is_meta()) {
    return;
  }
  const auto inside = indices.ge(0).logical_and(indices.lt(rows)).all();
  if (indices.is_cpu()) {
    TESSERA_CHECK(inside.item<bool>(), "embedding: an index is outside the ", rows,
                  " rows of the table: the indices are from ", indices.min().item<std::int64_t>(),
                  " to ", indices.max().item<std::int64_t>(), "; check the vocabulary size");
  } else {
    // The device assertion does not wait for the GPU: a wrong index fails later, on the device.
    at::_assert_async(inside, "embedding: an index is outside the rows");
  }
}

/// Looks up `indices` in `weight`, the rows from row `first` on of an embedding table with `rows`
/// rows. Returns zeros for an index whose row is on another rank.
at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices, std::int64_t first,
                          std::int64_t rows) {
  check_range(indices, rows);
  if (weight.size(0) == 0) {
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    return at::zeros(sizes, weight.options());
  }
  const auto local = indices.sub(first);
  // Indices of rows on other ranks look up row 0; these results are then set to zero.
  const auto elsewhere = local.lt(0).logical_or_(local.ge(weight.size(0)));
  return at::embedding(weight, local.masked_fill(elsewhere, 0))
      .masked_fill_(elsewhere.unsqueeze(-1), 0);
}

/// aten::gather on a shard of dimension `dim`. The shard begins at global position `first`; `size`
/// is the global size. Gives zero for an index of another rank.
at::Tensor gather_part(const at::Tensor& self, std::int64_t dim, const at::Tensor& index,
                       std::int64_t first, std::int64_t size) {
  if (index.numel() > 0 && index.is_cpu()) {
    TESSERA_CHECK(index.min().item<std::int64_t>() >= 0 && index.max().item<std::int64_t>() < size,
                  "gather: an index is outside dimension ", dim, " of size ", size);
  }
  if (self.size(dim) == 0) {
    return at::zeros(index.sizes(), self.options());
  }
  const auto local = index.sub(first);
  const auto elsewhere = local.lt(0).logical_or_(local.ge(self.size(dim)));
  return self.gather(dim, local.masked_fill(elsewhere, 0)).masked_fill_(elsewhere, 0);
}

TORCH_LIBRARY(tessera_local, library) {
  library.def("embedding_rows(Tensor weight, Tensor indices, int first, int rows) -> Tensor");
  library.def("gather_part(Tensor self, int dim, Tensor index, int first, int size) -> Tensor");
  library.impl("embedding_rows",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &embedding_rows));
  library.impl("gather_part",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &gather_part));
}

}  // namespace
}  // namespace tessera::detail
