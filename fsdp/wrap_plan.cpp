#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "module_tree.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/policy.h"
#include "tessera/nn/containers.h"
#include "unit.h"
#include "unit_parameters.h"

namespace tessera::fsdp {
namespace {

std::string name_of(const std::string& fqn) {
  return fqn.empty() ? "the root" : "'" + fqn + "'";
}

/// Every parameter with the FQNs of all modules that share it.
struct SharedParameter {
  std::string fqn;
  nn::SlotPtr slot;
  std::vector<std::string> owners;
};

std::vector<SharedParameter> parameters_of(const ModuleTree& tree) {
  std::vector<SharedParameter> parameters;
  std::set<const nn::ParameterSlot*> seen;
  for (const ModuleTree::Node& node : tree.nodes()) {
    for (const auto& [name, slot] : node.module->slots()) {
      if (!seen.insert(slot.get()).second) {
        continue;
      }
      SharedParameter parameter{node.fqn.empty() ? name : node.fqn + "." + name, slot, {}};
      for (const nn::ParameterSlot::Owner& owner : slot->owners()) {
        const std::string* fqn = tree.fqn_of(owner.module);
        TESSERA_CHECK(
            fqn != nullptr, "plan_units: parameter '", parameter.fqn, "' is shared with a ",
            owner.module->name(),
            " that is not in this tree or is a unit already; plan the module that holds both");
        parameter.owners.push_back(*fqn);
      }
      parameters.push_back(std::move(parameter));
    }
  }
  return parameters;
}

/// Asks the policy of each module, bottom-up.
class UnitChooser {
 public:
  UnitChooser(const ModuleTree& tree, const Policy& policy) : tree_(tree), policy_(policy) {}

  std::vector<std::pair<std::string, UnitOptions>> choose() {
    std::vector<std::pair<std::string, UnitOptions>> chosen;
    left_.resize(tree_.nodes().size());
    for (std::size_t i = 0; i + 1 < tree_.nodes().size(); ++i) {  // the last is the root
      const ModuleTree::Node& node = tree_.nodes()[i];
      left_[i] = own_numel(node);
      for (const std::size_t child : node.children) {
        left_[i] += left_[child];
      }
      if (std::optional<UnitOptions> options = policy_({node.fqn, *node.module, left_[i]})) {
        TESSERA_CHECK(dynamic_cast<const nn::ModuleList*>(node.module) == nullptr,
                      "plan_units: the policy chose '", node.fqn,
                      "', a ModuleList, which has no forward; choose the modules in it");
        left_[i] = 0;
        chosen.emplace_back(node.fqn, *std::move(options));
      }
    }
    return chosen;
  }

 private:
  std::int64_t own_numel(const ModuleTree::Node& node) {
    std::int64_t numel = 0;
    for (const auto& [name, slot] : node.module->slots()) {
      numel += counted_.insert(slot.get()).second ? slot->get().numel() : 0;
    }
    return numel;
  }

  const ModuleTree& tree_;
  const Policy& policy_;
  std::vector<std::int64_t> left_;  ///< of each node: elements that no unit has
  std::set<const nn::ParameterSlot*> counted_;
};

Options merged(const UnitOptions& unit, const Options& root) {
  Options options = root;
  options.mp_policy = unit.mp_policy.value_or(root.mp_policy);
  options.neighbours = unit.neighbours.value_or(root.neighbours);
  options.may_be_unused = unit.may_be_unused.value_or(root.may_be_unused);
  options.reshard_after_forward =
      unit.reshard_after_forward ? unit.reshard_after_forward : root.reshard_after_forward;
  return options;
}

/// The lowest unit that holds all owners. Units come bottom-up, so it is the first that does.
PlannedUnit& unit_for(WrapPlan& plan, const SharedParameter& parameter) {
  return *std::ranges::find_if(plan, [&](const PlannedUnit& unit) {
    return std::ranges::all_of(parameter.owners,
                               [&](const std::string& owner) { return holds(unit.fqn, owner); });
  });
}

void check_frozen(const PlannedUnit& unit, const std::map<std::string, nn::SlotPtr>& slots) {
  if (unit.frozen_numel == 0 || unit.frozen_numel == unit.numel) {
    return;
  }
  std::string frozen;
  std::int64_t bytes = 0;
  for (const std::string& name : unit.parameters) {
    const at::Tensor& tensor = slots.at(name)->persistent();
    if (!tensor.requires_grad()) {
      frozen += (frozen.empty() ? "'" : ", '") + name + "'";
      bytes += static_cast<std::int64_t>(tensor.numel() * tensor.itemsize());
    }
  }
  fail("plan_units: ", name_of(unit.fqn),
       " would be one unit of trainable parameters and frozen ones (", frozen, "), whose ", bytes,
       " bytes are gathered with every backward; give the frozen modules a "
       "unit of their own, or set allow_mixed_frozen");
}

std::string dtype_name(const std::optional<c10::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "-";
}

/// What else differs from the defaults.
std::string notes_of(const Options& options) {
  std::string notes;
  if (options.mp_policy.output_dtype) {
    notes += " output " + dtype_name(options.mp_policy.output_dtype);
  }
  notes += options.mp_policy.cast_forward_inputs ? "" : " inputs not cast";
  notes += options.mp_policy.restore_input_dtype ? " input type restored" : "";
  notes += options.offload_policy ? " offloaded" : "";
  notes += options.may_be_unused ? " may be unused" : "";
  return notes;
}

std::string line_of(const PlannedUnit& unit) {
  const Options& o = unit.options;
  return fmt::format(
             "{:<32} {:>10} {:>14} {:>14} {:>8} {:>10} {:>10} {:>10}",
             unit.fqn.empty() ? "(root)" : unit.fqn, unit.parameters.size(), unit.numel,
             unit.frozen_numel,
             o.reshard_after_forward ? (*o.reshard_after_forward ? "yes" : "no") : "default",
             o.neighbours, dtype_name(o.mp_policy.param_dtype),
             dtype_name(o.mp_policy.reduce_dtype)) +
         notes_of(o);
}

/// What was applied to a root.
struct AppliedPlan {
  std::vector<std::string> lines;
};

std::vector<std::string> lines_of(const WrapPlan& plan) {
  std::vector<std::string> lines;
  for (const PlannedUnit& unit : plan) {
    std::string line = line_of(unit);
    for (const std::string& parameter : unit.parameters) {
      line += " " + parameter;
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

/// Throws unless the plans are the same.
void check_same(const AppliedPlan& applied, const std::vector<std::string>& lines) {
  const auto missing = [](const std::vector<std::string>& from,
                          const std::vector<std::string>& in) {
    std::string text;
    for (const std::string& line : from) {
      text += std::ranges::find(in, line) == in.end() ? "\n  " + line : "";
    }
    return text.empty() ? std::string(" nothing") : text;
  };
  TESSERA_CHECK(applied.lines == lines,
                "fully_shard: another plan was applied to this module. Only in the applied one:",
                missing(applied.lines, lines),
                "\nonly in this one:", missing(lines, applied.lines));
}

}  // namespace

WrapPlan plan_units(const nn::ModuleBase& root, const Policy& policy, const Options& root_options) {
  // With a plan applied, the same policy must give the same plan again.
  const bool planned_before = root.attached<AppliedPlan>() != nullptr;
  const ModuleTree tree(root, !planned_before);
  TESSERA_CHECK(!tree.nodes().empty(), "plan_units: the root is a unit already, made by hand");

  WrapPlan plan;
  std::set<std::string> mixed_allowed;
  for (const auto& [fqn, unit] : UnitChooser(tree, policy).choose()) {
    plan.push_back({fqn, merged(unit, root_options), {}, 0, 0});
    if (unit.allow_mixed_frozen) {
      mixed_allowed.insert(fqn);
    }
  }
  plan.push_back({"", root_options, {}, 0, 0});

  std::map<std::string, nn::SlotPtr> slots;
  for (const SharedParameter& parameter : parameters_of(tree)) {
    if (root_options.ignored.contains(parameter.slot)) {
      continue;
    }
    PlannedUnit& unit = unit_for(plan, parameter);
    const at::Tensor& tensor = parameter.slot->persistent();
    unit.parameters.push_back(parameter.fqn);
    unit.numel += tensor.numel();
    unit.frozen_numel += tensor.requires_grad() ? 0 : tensor.numel();
    slots.emplace(parameter.fqn, parameter.slot);
  }
  for (const PlannedUnit& unit : plan) {
    if (!unit.fqn.empty() && !mixed_allowed.contains(unit.fqn)) {
      check_frozen(unit, slots);
    }
  }
  return plan;
}

std::string to_string(const WrapPlan& plan) {
  std::string text =
      fmt::format("{:<32} {:>10} {:>14} {:>14} {:>8} {:>10} {:>10} {:>10}\n", "unit", "parameters",
                  "elements", "frozen", "reshard", "neighbours", "param", "reduce");
  for (const PlannedUnit& unit : plan) {
    text += line_of(unit) + "\n";
  }
  return text;
}

void fully_shard(nn::ModuleBase& root, const DeviceMesh& mesh, const WrapPlan& plan) {
  std::vector<std::string> lines = lines_of(plan);
  if (const auto applied = root.attached<AppliedPlan>()) {
    check_same(*applied, lines);
    return;
  }
  const ModuleTree tree(root, true);
  std::map<std::string, nn::SlotPtr> slots;
  for (const SharedParameter& parameter : parameters_of(tree)) {
    slots.emplace(parameter.fqn, parameter.slot);
  }
  const DataMesh data_mesh(mesh);
  std::vector<std::pair<const PlannedUnit*, nn::NamedSlots>> units;
  for (const PlannedUnit& unit : plan) {
    TESSERA_CHECK(tree.find(unit.fqn) != nullptr, "fully_shard: the plan has a unit ",
                  name_of(unit.fqn),
                  ", but there is no such module without a unit; make the plan of "
                  "this module tree");
    nn::NamedSlots parameters;
    for (const std::string& name : unit.parameters) {
      const auto found = slots.find(name);
      TESSERA_CHECK(found != slots.end(), "fully_shard: the plan has a parameter '", name,
                    "', but the module tree has not; make the plan of this module tree");
      parameters.emplace_back(name, found->second);
      slots.erase(found);
    }
    check_parameters(parameters, data_mesh, unit.options);
    units.emplace_back(&unit, std::move(parameters));
  }
  for (auto& [unit, parameters] : units) {
    make_unit({tree.find(unit->fqn)->module}, std::move(parameters), data_mesh, unit->options);
  }
  root.attach(std::make_shared<AppliedPlan>(AppliedPlan{std::move(lines)}));
}

}  // namespace tessera::fsdp
