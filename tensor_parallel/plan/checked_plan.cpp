// Collects the placements that a plan's entries give to parameters, and refuses contradictions.
// Several modules may place a tied parameter if they agree; only one style may place the parameters
// of a module.

#include "plan/checked_plan.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <unordered_map>

#include "plan/plan_text.h"
#include "tessera/core/error.h"
#include "tessera/core/layout.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/adopted_module.h"

namespace tessera::tensor_parallel {
namespace {

/// A module in nn::Hooked calls its own parts, without their hooks.
void check_is_called(const NamedModule& target, const ParallelStyle& style) {
  TESSERA_CHECK(
      !style.adds_hooks() || dynamic_cast<const nn::AdoptedModule*>(target.module) == nullptr,
      quoted(target.fqn), " is a ", target.module->name(), " inside of a module that nn::Hooked ",
      "holds, which calls it without hooks; colwise_parallel() and rowwise_parallel() without "
      "layouts, and place_parameters(), say how its parameters are split");
}

/// No operator on distributed tensors takes a sparse gradient.
void check_gradients_are_dense(const nn::ModuleBase& module) {
  const auto* holder = dynamic_cast<const nn::detail::AdoptsModule*>(&module);
  const auto* embedding =
      holder == nullptr ? nullptr : holder->adopted_module().as<torch::nn::Embedding>();
  TESSERA_CHECK(embedding == nullptr || !embedding->options.sparse(), "the weight of a ",
                module.name(), " gets sparse gradients, which cannot be distributed; make the ",
                "module without sparse(true)");
}

/// Styles know a module, but not its FQN.
Application applied(const NamedModule& target, const StylePtr& style, const DeviceMesh& mesh) {
  try {
    check_is_called(target, *style);
    Application application{target, style, style->parameters(*target.module)};
    style->check(*target.module, mesh);
    if (!application.parameters.empty()) {
      check_gradients_are_dense(*target.module);
    }
    return application;
  } catch (const Error& error) {
    fail("parallelize_module: ", quoted(target.fqn), ": ", error.what());
  }
}

bool is_below(const NamedModule& inner, const NamedModule& outer) {
  return inner.fqn != outer.fqn && (outer.fqn.empty() || inner.fqn.starts_with(outer.fqn + "."));
}

bool places(const Application& application, const nn::SlotPtr& slot) {
  return std::ranges::any_of(application.parameters,
                             [&](const auto& placed) { return placed.first == slot; });
}

bool is_own(const nn::ParameterSlot& slot, const nn::ModuleBase& module) {
  return std::ranges::any_of(slot.owners(),
                             [&](const auto& owner) { return owner.module == &module; });
}

/// An entry for a container places the parameters below it that no entry for a module there places.
void leave_to_inner(std::vector<Application>& applications) {
  for (Application& outer : applications) {
    std::erase_if(outer.parameters, [&](const auto& placed) {
      const auto takes = [&](const Application& inner) {
        return is_below(inner.target, outer.target) && places(inner, placed.first);
      };
      return !is_own(*placed.first, *outer.target.module) &&
             std::ranges::any_of(applications, takes);
    });
  }
}

/// The placement of each parameter that the plan names.
class PlacementTable {
 public:
  explicit PlacementTable(const DeviceMesh& mesh) : mesh_(mesh) {}

  void add(const Application& application) {
    const auto& placements = application.parameters;
    // A style for activations alone may be combined with one that places parameters.
    if (placements.empty()) {
      return;
    }
    const auto [owner, first] = styles_.emplace(application.target.module, application.style);
    TESSERA_CHECK(first, "parallelize_module: two entries of the plan place the parameters of ",
                  quoted(application.target.fqn), ", ", owner->second->name(), " and ",
                  application.style->name(), "; keep one");
    for (const auto& [slot, placement] : placements) {
      add_slot(application, slot, placement);
    }
  }

  /// In the plan's order, the same on every rank, and not that of a hash table.
  std::vector<PlacedParameter> take() { return std::move(placed_); }

 private:
  void add_slot(const Application& application, const nn::SlotPtr& slot,
                const Placement& placement) {
    check_slot(application, *slot, placement);
    const auto [known, first] = wanted_.emplace(slot.get(), placement);
    TESSERA_CHECK(known->second == placement, "parallelize_module: ", application.style->name(),
                  " places a parameter of ", quoted(application.target.fqn), " as ",
                  to_string(placement), ", but a module that shares it has placed it as ",
                  to_string(known->second), "; tied parameters need one placement");
    if (first) {
      placed_.push_back({slot, placement});
    }
  }

  void check_slot(const Application& application, const nn::ParameterSlot& slot,
                  const Placement& placement) const {
    TESSERA_CHECK(!slot.has_persistent(), "parallelize_module: the parameters of ",
                  quoted(application.target.fqn),
                  " belong to an FSDP unit; call parallelize_module before fully_shard");
    const at::Tensor& tensor = slot.get();
    // Throws for a placement that the tensor's sizes do not allow.
    const LayoutPtr layout = to_layout({mesh_.size()}, {placement}, tensor.sizes());
    if (!tessera::is_distributed(tensor)) {
      return;
    }
    const ShardingSpec& spec = sharding_spec(tensor);
    if (slot.replicated_by_default() && spec.mesh == mesh_) {
      return;
    }
    // With one owner the module itself was parallelized before.
    const bool tied = slot.owners().size() > 1;
    TESSERA_CHECK(tied && spec.mesh == mesh_ && spec.layout == layout,
                  "parallelize_module: a parameter of ", quoted(application.target.fqn),
                  " is distributed already, as ", to_string(*spec.layout), " on ",
                  to_string(spec.mesh), "; parallelize a module once");
  }

  const DeviceMesh& mesh_;
  std::unordered_map<const nn::ModuleBase*, StylePtr> styles_;
  std::unordered_map<const nn::ParameterSlot*, Placement> wanted_;
  std::vector<PlacedParameter> placed_;
};

nn::NamedSlots unnamed_parameters(const nn::ModuleBase& module, const DeviceMesh& mesh,
                                  const CheckedPlan& plan) {
  nn::NamedSlots unnamed = module.named_slots();
  std::erase_if(unnamed, [&](const auto& entry) {
    const nn::SlotPtr& slot = entry.second;
    return slot->has_persistent() || is_distinct_on(*slot, mesh) ||
           tessera::is_distributed(slot->get()) ||
           std::ranges::find(plan.parameters, slot, &PlacedParameter::slot) !=
               plan.parameters.end();
  });
  return unnamed;
}

}  // namespace

bool is_distinct_on(const nn::ParameterSlot& slot, const DeviceMesh& mesh) {
  const DeviceMesh& distinct = slot.distinct_along();
  return distinct && std::ranges::any_of(distinct.ranks(), [&](int rank) {
           return rank != mesh.world()->rank() &&
                  std::ranges::find(mesh.ranks(), rank) != mesh.ranks().end();
         });
}

CheckedPlan check_entries(nn::ModuleBase& module, const DeviceMesh& mesh,
                          const ParallelizePlan& plan) {
  TESSERA_CHECK(mesh && mesh.ndim() == 1, "parallelize_module: the mesh is ",
                mesh ? to_string(mesh) : "undefined",
                "; pass one dimension of it, for example mesh[\"tp\"]");
  module.named_slots();  // refuses parameters without slots
  CheckedPlan checked;
  PlacementTable placements(mesh);
  for (const auto& [pattern, style] : plan) {
    TESSERA_CHECK(style != nullptr, "parallelize_module: the entry \"", pattern,
                  "\" has no style; give it one, or leave the entry out");
    for (const NamedModule& target : match_modules(module, pattern)) {
      checked.applications.push_back(applied(target, style, mesh));
    }
  }
  leave_to_inner(checked.applications);
  for (const Application& application : checked.applications) {
    placements.add(application);
  }
  checked.parameters = placements.take();
  checked.unnamed = unnamed_parameters(module, mesh, checked);
  return checked;
}

}  // namespace tessera::tensor_parallel
