// check_policy() checks StrictScope and ReplicationScope at each call, even with a cached call
// plan, because cache keys do not contain these scopes.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "autograd/autograd.h"
#include "operators/operator_info.h"
#include "plan/call_plan.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

/// Describes for messages which argument each tensor is: "argument 1"; in a list, "argument 0[2]".
std::vector<std::string> places_of(const BoundCall& bound) {
  std::vector<std::string> places;
  for (std::size_t i = 0; i < bound.call.args.size(); ++i) {
    const std::string place = "argument " + std::to_string(i);
    if (std::holds_alternative<TensorRef>(bound.call.args[i])) {
      places.push_back(place);
    } else if (const auto* list = std::get_if<std::vector<TensorRef>>(&bound.call.args[i])) {
      for (std::size_t j = 0; j < list->size(); ++j) {
        if ((*list)[j].index >= 0) {
          places.push_back(fmt::format("{}[{}]", place, j));
        }
      }
    }
  }
  return places;
}

std::string describe_input(const CallPlan::Input& input, const at::Tensor& tensor) {
  if (!tessera::is_distributed(tensor)) {
    return fmt::format("[{}], is plain", fmt::join(input.spec->sizes, ", "));
  }
  std::string text = describe(*input.spec);
  if (input.plan) {
    text += " -> " + describe(*input.target, input.spec->sizes);
  }
  return text;
}

/// Describes the inputs of a call as text for messages: "argument 0, [8, 4] on (dp=2) as [Shard(0)]
/// -> [Replicate()]; argument 1, 'up.bias', [4], is plain".
std::string describe_inputs(const CallPlan& plan, const BoundCall& bound) {
  const std::vector<std::string> places = places_of(bound);
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
    const std::string name = parameter_name(bound.tensors[i]);
    parts.push_back(fmt::format("{}, {}{}", places[i], name.empty() ? "" : "'" + name + "', ",
                                describe_input(plan.inputs[i], bound.tensors[i])));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

/// Whether a plain tensor is a single element that requires grad, such as a rank's own loss.
bool is_trained_number(const at::Tensor& tensor) {
  return !tessera::is_distributed(tensor) && tensor.numel() == 1 && tensor.requires_grad();
}

std::string remedy_of_mixing(const PlannedCall& call, const BoundCall& bound) {
  const std::vector<at::Tensor>& tensors = bound.tensors;
  if (std::ranges::any_of(written_inputs(call.info, bound), [&](std::size_t input) {
        return tessera::is_distributed(tensors[input]);
      })) {
    return "to write values that are equal on every rank, distribute the values first "
           "(distribute_tensor) or write in a ReplicationScope; initialise parameters before "
           "sharding, or with nn::init_weights";
  }
  for (const at::Tensor& tensor : tensors) {
    const std::string name = parameter_name(tensor);
    if (!name.empty() && !tessera::is_distributed(tensor)) {
      return "call parallelize_module for a module that contains '" + name + "'; parameters that " +
             "the plan does not name are replicated";
    }
  }
  const std::string remedy = remedy_of_calling(tensors);
  if (remedy.empty() && std::ranges::any_of(tensors, is_trained_number)) {
    return "a plain scalar that requires grad may differ between ranks, for example a loss of the "
           "rank's batch; convert the distributed tensor with DistributedTensor(x).full_tensor(), "
           "or with full_tensor(Placements{Partial{ReduceOp::kAvg}}) if it is multiplied by such a "
           "loss, or use a ReplicationScope if the number is equal on all ranks";
  }
  return remedy.empty() ? "call the operator in the forward of the parallelized module, where "
                          "plain tensors count as equal on every rank; or set use_local_output = "
                          "true in the last style, distribute the plain tensors first, or use a "
                          "ReplicationScope if they are equal on all ranks"
                        : remedy;
}

/// Warns once per process about an operator, also if several ranks are threads of the process.
void warn_once(const std::string& name) {
  static std::mutex mutex;
  // The set of names is never destroyed, because a thread can still warn while the process ends.
  static auto& warned = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (!warned.insert(name).second) {
    return;
  }
  TORCH_WARN(name,
             " has no sharding rule for these arguments; the inputs are gathered and the result is "
             "replicated (a StrictScope makes this an error)");
}

/// Returns advice for the error message of a call that moves data. For a Partial input, names the
/// usual cause: an earlier Linear with sharded input features.
std::string remedy_of_moving(const CallPlan& plan) {
  const std::string remedy = "redistribute the inputs explicitly first";
  if (std::ranges::any_of(plan.inputs, [](const CallPlan::Input& input) {
        return input.plan != nullptr && input.spec->sharding.layout->is_partial();
      })) {
    return remedy +
           ", or set rowwise_parallel() in the plan for the Linear that returned the pending sum";
  }
  return plain_is_replicated_on(plan.replicated.mesh)
             ? remedy + ", or in the plan with prepare_module_input()"
             : remedy;
}

/// Checks a call that moves data without a request of the program. Throws Error in a StrictScope;
/// otherwise warns if the operator has no sharding rule.
void check_movement(const PlannedCall& call) {
  const OperatorInfo& info = call.info;
  if (!is_strict()) {
    if (!call.plan.has_rule) {
      warn_once(info.name);
    }
    return;
  }
  const std::string inputs = describe_inputs(call.plan, bind_call(info, call.arguments()));
  TESSERA_CHECK(call.plan.has_rule, info.name, " has no sharding rule for ", inputs,
                ", and the strict scope refuses to gather; redistribute inputs to Replicate first");
  fail(info.name, " needs its inputs redistributed (", inputs,
       "), which the strict scope refuses; ", remedy_of_moving(call.plan));
}

[[noreturn]] void fail_of_mixing(const PlannedCall& call, const BoundCall& bound) {
  fail(call.info.name, " mixes distributed tensors with plain tensors (",
       describe_inputs(call.plan, bound), "); ", remedy_of_mixing(call, bound));
}

/// Whether a call has a plain argument with several elements, or a plain number that requires grad.
/// Ranks compare other plain numbers.
bool mixes_more_than_numbers(const PlannedCall& call, const BoundCall& bound) {
  return call.plan.mixes_plain || std::ranges::any_of(bound.tensors, is_trained_number);
}

std::vector<at::Tensor> plain_tensors_read(const PlannedCall& call) {
  const auto arguments = call.arguments();
  std::vector<c10::IValue> read(arguments.begin(), arguments.end());
  for (const int argument : call.info.written) {
    const auto index = static_cast<std::size_t>(argument);
    if (call.op.schema().arguments()[index].kwarg_only()) {
      read[index] = {};
    }
  }
  return bind_call(call.info, read).tensors;
}

/// Throws Error for plain tensors outside of a ReplicationScope. In backward hooks and functions of
/// the program, where scopes do not apply, ranks compare the plain tensors instead.
void check_plain(const PlannedCall& call, const BoundCall& bound) {
  const DeviceMesh& mesh = call.plan.replicated.mesh;
  const bool replicated = plain_is_replicated_on(mesh);
  if (!replicated && backward_code() == BackwardCode::kNone &&
      mixes_more_than_numbers(call, bound)) {
    fail_of_mixing(call, bound);
  }
  if (!replicated || call.plan.compares_plain) {
    compare_plain(mesh, call.info.name, plain_tensors_read(call));
  }
}

/// Throws Error if an argument of another library's operator requires grad and the operator has no
/// autograd kernel. (Operators that run inside an autograd kernel are below autograd.)
void check_gradients(const PlannedCall& call) {
  if (!call.info.is_own || !at::GradMode::is_enabled() || is_below_autograd()) {
    return;
  }
  TESSERA_CHECK(std::ranges::none_of(bind_call(call.info, call.arguments()).tensors,
                                     [](const at::Tensor& t) { return t.requires_grad(); }),
                call.info.name,
                " has no autograd kernel, but an argument requires a gradient; implement the "
                "operator for DispatchKey::Autograd, or call it in a NoGradGuard");
}

}  // namespace

std::string remedy_of_calling(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    const std::string name = tessera::is_distributed(tensor) ? parameter_name(tensor) : "";
    if (!name.empty()) {
      return "call the module of '" + name +
             "' as (*m)(x) and not as m->forward(x), so that the module's hooks run (for other "
             "methods, call the result of fsdp::register_forward_method), or use the parameter in "
             "the forward of the module that the plan was applied to";
    }
  }
  return "";
}

void compare_plain(const DeviceMesh& mesh, std::string_view what, std::vector<at::Tensor> tensors) {
  std::erase_if(tensors, [](const at::Tensor& tensor) {
    return tessera::is_distributed(tensor) || tensor.layout() != c10::kStrided ||
           is_wrapped_number(tensor);
  });
  if (!tensors.empty()) {
    check_replicated(mesh, what, tensors);
  }
}

void check_gather(const std::string& name, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tessera::is_distributed(tensor) || sharding_spec(tensor).layout->is_replicated()) {
      continue;
    }
    TESSERA_CHECK(
        !is_strict(), name, " has no sharding rule for ", describe(*as_distributed(tensor)->spec()),
        ", and the strict scope refuses to gather; redistribute inputs to Replicate first");
    return warn_once(name);
  }
}

// Comparisons of plain numbers are not cached: if only some ranks had cached a comparison, the
// other ranks would wait forever.
void check_policy(const PlannedCall& call) {
  check_gradients(call);
  if (call.plan.takes_plain) {
    const BoundCall bound = bind_call(call.info, call.arguments());
    check_plain(call, bound);
    for (const at::Tensor& tensor : bound.tensors) {
      if (!tessera::is_distributed(tensor) && tensor.requires_grad()) {
        keep_gradient_plain(tensor);
      }
    }
  }
  if (call.plan.moves && !call.plan.asked_for) {
    check_movement(call);
  }
}

}  // namespace tessera::detail
