// Makes FSDP units and finds the unit of a module. Each module owns its unit (ModuleBase::attach);
// there is no global table.

#include "unit.h"

#include <iterator>
#include <map>

#include "tessera/core/error.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::fsdp {

namespace {

// A program passes sharded parameters to autograd::grad(), but the autograd graph of the loss ends
// in unsharded tensors. So ShardGradient replaces each sharded parameter by its unsharded tensor.

using nn::BackwardCall;
using tessera::detail::as_leaf;
using tessera::detail::Edge;
using tessera::detail::Node;
using tessera::detail::variable_list;
using Request = ShardedParameter::Request;

template <class Act>
void for_each_parameter(Unit& unit, Act&& act) {
  for (ParameterGroup& group : unit.groups()) {
    std::ranges::for_each(group.parameters(), act);
  }
}

class ShardGradient final : public nn::StandInGradient {
 public:
  ShardGradient(const at::Tensor& sharded, std::weak_ptr<Unit> unit, ShardedParameter& parameter)
      : StandInGradient(sharded), unit_(std::move(unit)), parameter_(&parameter) {}

  variable_list execute(const BackwardCall& call, const nn::RunBackward& run) override;

  std::shared_ptr<Unit> unit() const { return unit_.lock(); }
  ShardedParameter& parameter() const { return *parameter_; }

 private:
  std::weak_ptr<Unit> unit_;
  ShardedParameter* parameter_;
};

struct RequestedParameter {
  std::shared_ptr<Unit> unit;
  ShardedParameter* parameter;
};

std::vector<RequestedParameter> requested_by(const BackwardCall& call) {
  std::vector<RequestedParameter> requested;
  for (const Edge& output : call.outputs) {
    const auto* node = dynamic_cast<const ShardGradient*>(output.function.get());
    const std::shared_ptr<Unit> unit = node != nullptr ? node->unit() : nullptr;
    if (unit != nullptr && node->parameter().sharded().is_same(node->variable) &&
        node->parameter().unsharded().defined()) {
      requested.push_back({unit, &node->parameter()});
    }
  }
  return requested;
}

Edge leaf_edge(const ShardedParameter& parameter) {
  return {tessera::detail::leaf_node(parameter.unsharded()), 0};
}

/// Whether the autograd graph of `call` contains the unsharded tensor of a `requested` parameter.
bool reaches(const BackwardCall& call, const std::vector<RequestedParameter>& requested) {
  std::unordered_set<const Node*> leaves;
  for (const RequestedParameter& each : requested) {
    if (each.parameter->unsharded().requires_grad()) {
      leaves.insert(leaf_edge(*each.parameter).function.get());
    }
  }
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> next;
  const auto add = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second) {
      next.push_back(edge.function.get());
    }
  };
  std::ranges::for_each(call.roots, add);
  while (!next.empty()) {
    const Node* node = next.back();
    next.pop_back();
    if (leaves.contains(node)) {
      return true;
    }
    std::ranges::for_each(node->next_edges(), add);
  }
  return false;
}

/// Returns all units of each model that has a requested parameter, without duplicates.
std::vector<std::shared_ptr<Unit>> units_around(const std::vector<RequestedParameter>& requested) {
  std::vector<std::shared_ptr<Unit>> units;
  for (const RequestedParameter& each : requested) {
    if (std::ranges::find(units, each.unit) == units.end()) {
      std::ranges::copy(each.unit->units_of_iteration(), std::back_inserter(units));
    }
  }
  return units;
}

/// While a RequestScope exists, `units` reduce only the gradients of the `requested` parameters.
class RequestScope {
 public:
  RequestScope(std::vector<std::shared_ptr<Unit>> units,
               const std::vector<RequestedParameter>& requested, Request request)
      : units_(std::move(units)) {
    set_all(Request::kLeaveOut);
    for (const RequestedParameter& each : requested) {
      each.parameter->set_request(request);
    }
  }
  RequestScope(const RequestScope&) = delete;
  RequestScope& operator=(const RequestScope&) = delete;
  ~RequestScope() { set_all(Request::kNone); }

 private:
  void set_all(Request request) {
    for (const std::shared_ptr<Unit>& unit : units_) {
      for_each_parameter(*unit, [&](ShardedParameter& each) { each.set_request(request); });
    }
  }

  std::vector<std::shared_ptr<Unit>> units_;
};

/// The constructor takes the gradients out of `.grad` of the leaf tensors in `outputs`, so that
/// `.grad` gets only the gradients of this backward. The destructor puts the old gradients back.
class EmptyGradients {
 public:
  explicit EmptyGradients(const tessera::detail::edge_list& outputs) {
    for (const Edge& output : outputs) {
      if (auto* leaf = as_leaf(output)) {
        const auto [entry, is_new] = before_.try_emplace(leaf, at::Tensor());
        if (is_new) {
          entry->second = std::exchange(leaf->variable.mutable_grad(), at::Tensor());
        }
      }
    }
  }
  EmptyGradients(const EmptyGradients&) = delete;
  EmptyGradients& operator=(const EmptyGradients&) = delete;
  ~EmptyGradients() {
    for (auto& [leaf, gradient] : before_) {
      leaf->variable.mutable_grad() = std::move(gradient);
    }
  }

 private:
  std::map<tessera::detail::LeafNode*, at::Tensor> before_;
};

void check_returnable(const BackwardCall& call, const std::vector<RequestedParameter>& requested,
                      const std::vector<std::shared_ptr<Unit>>& units) {
  const std::string first =
      "autograd::grad of " + describe(*requested.front().parameter->slot()) + " of an FSDP unit";
  TESSERA_CHECK(!call.create_graph, first,
                " was called with create_graph, but FSDP sums the gradient over ranks, and the sum "
                "has no graph; leave create_graph out, or differentiate twice on one rank");
  TESSERA_CHECK(
      std::ranges::none_of(units, [](const auto& unit) { return unit->settings().step_goes_on(); }),
      first,
      " was called while set_requires_gradient_sync, set_requires_all_reduce or "
      "set_is_last_backward is false; autograd::grad needs all three true");
  for (const Edge& output : call.outputs) {
    TESSERA_CHECK(as_leaf(output) != nullptr || tessera::detail::is_unreachable(output), first,
                  " was called with inputs that are results of operators; call autograd::grad once "
                  "for the leaves and once for the results, first with retain_graph");
  }
}

/// Returns a copy of `call` that also adds the gradients of the `requested` parameters to `.grad`
/// of their unsharded tensors.
BackwardCall adding(const BackwardCall& call, const std::vector<RequestedParameter>& requested) {
  BackwardCall adding = call;
  adding.accumulate = true;
  for (const RequestedParameter& each : requested) {
    if (each.parameter->unsharded().requires_grad()) {
      adding.outputs.push_back(leaf_edge(*each.parameter));
    }
  }
  return adding;
}

variable_list ShardGradient::execute(const BackwardCall& call, const nn::RunBackward& run) {
  const std::vector<RequestedParameter> requested = requested_by(call);
  if (requested.empty() || !reaches(call, requested)) {
    return run(call);
  }
  const std::vector<std::shared_ptr<Unit>> units = units_around(requested);
  if (call.accumulate) {
    const RequestScope scope(units, requested, Request::kAdd);
    return run(adding(call, requested));
  }
  check_returnable(call, requested, units);
  // Reductions of earlier backwards write to `.grad`. They must end before EmptyGradients moves
  // `.grad`.
  for (const std::shared_ptr<Unit>& unit : units) {
    unit->comm_context().settle();
  }
  const RequestScope scope(units, requested, Request::kReturn);
  const EmptyGradients empty(call.outputs);
  run(adding(call, requested));
  variable_list gradients;
  for (const Edge& output : call.outputs) {
    const auto* leaf = as_leaf(output);
    gradients.push_back(leaf != nullptr ? leaf->variable.grad() : at::Tensor());
  }
  return gradients;
}

void offer_gradients(const std::shared_ptr<Unit>& unit) {
  nn::ask_stand_ins();
  for_each_parameter(*unit, [&](ShardedParameter& parameter) {
    parameter.set_stand_in([unit = std::weak_ptr(unit), &parameter](const at::Tensor& sharded) {
      return tessera::detail::make_node<ShardGradient>(sharded, unit, parameter);
    });
  });
}

/// Lets a unit reduce its gradient buckets while backward still computes.
void watch_gradients(const std::shared_ptr<Unit>& unit) {
  for_each_parameter(*unit, [&](ShardedParameter& parameter) {
    parameter.set_gradient_notice([unit = std::weak_ptr(unit), &parameter] {
      if (const std::shared_ptr<Unit> alive = unit.lock()) {
        alive->note_gradient(parameter);
      }
    });
  });
}

}  // namespace

std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse) {
  std::vector<std::shared_ptr<Unit>> units;
  const auto add = [&units](const std::string&, const nn::ModuleBase& each) {
    auto unit = each.attached<Unit>();
    if (unit != nullptr && std::ranges::find(units, unit) == units.end()) {
      units.push_back(std::move(unit));
    }
  };
  recurse ? nn::visit_modules(module, add) : add("", module);
  return units;
}

nn::detail::ModuleWalk outside_of_units() {
  return {.skip = [](const torch::nn::Module& module) {
    const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module);
    return ours != nullptr && ours->attached<Unit>() != nullptr;
  }};
}

std::shared_ptr<Unit> unit_of(const nn::ModuleBase& module, const char* caller) {
  std::shared_ptr<Unit> unit = module.attached<Unit>();
  TESSERA_CHECK(unit != nullptr, caller, ": this ", module.name(),
                " is not an FSDP unit; apply fully_shard to the module first");
  return unit;
}

std::vector<std::shared_ptr<Unit>> units_of(const nn::ModuleBase& module, bool recurse,
                                            const char* caller) {
  std::vector<std::shared_ptr<Unit>> units = units_of(module, recurse);
  TESSERA_CHECK(!units.empty(), caller, ": this ", module.name(),
                recurse ? " has no FSDP unit" : " is not an FSDP unit", "; call fully_shard first");
  return units;
}

void make_unit(const UnitSpec& spec) {
  // Buffers are moved first: if moving a buffer fails, all parameters are still unsharded.
  move_buffers(spec.modules, spec.mesh.device(), spec.options.ignored);
  const auto unit = std::make_shared<Unit>(spec);
  unit->install();
  offer_gradients(unit);
  if (unit->in_buckets()) {
    watch_gradients(unit);
  }
  const auto context = std::make_shared<nn::detail::CallContext>(
      nn::detail::CallContext{[unit = std::weak_ptr(unit)] { return unit.lock()->label(); }});
  for (nn::ModuleBase* module : spec.modules) {
    module->attach(unit);
    module->attach(context);
  }
  // The pointer to the unit is weak, because a submodule can outlive the module that owns the unit.
  const auto record = std::make_shared<nn::GradientRecord>(
      nn::GradientRecord{[weak = std::weak_ptr(unit)](const nn::ParameterSlot& slot) {
        const std::shared_ptr<Unit> alive = weak.lock();
        return alive != nullptr &&
               std::ranges::any_of(alive->groups(), [&](const ParameterGroup& group) {
                 return group.gradients().brought_nonfinite(slot);
               });
      }});
  for (const ParameterSpec& parameter : spec.parameters) {
    // Readers of an nn::GradientRecord do not know FSDP units. So each module that owns the
    // parameter gets the record.
    for (const nn::ParameterSlot::Owner& owner : parameter.slot->owners()) {
      owner.module->attach(record);
    }
  }
}

}  // namespace tessera::fsdp
