// The rows of a plan's table: the results of check_entries(), in the order of the model.

#include "tessera/tensor_parallel/plan_table.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "apply/apply_plan.h"
#include "apply/plan_recorder.h"
#include "plan/checked_plan.h"
#include "tessera/core/layout.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::tensor_parallel {

/// A table, and for each row that a style has the number of its application.
struct NumberedTable {
  PlanTable table;
  std::unordered_map<std::size_t, std::size_t> applications;
};

namespace {

std::int64_t bytes_at(const Layout& layout, const at::Tensor& tensor, std::int64_t rank) {
  const std::vector<std::int64_t> coordinate{rank};
  return local_numel(layout, tensor.sizes(), coordinate) *
         static_cast<std::int64_t>(tensor.itemsize());
}

/// Makes the rows, one module after another.
class RowMaker {
 public:
  RowMaker(const CheckedPlan& plan, const DeviceMesh& mesh) : plan_(plan), mesh_(mesh) {
    for (const PlacedParameter& parameter : plan.parameters) {
      placed_.insert(parameter.slot.get());
    }
    for (const auto& [name, slot] : plan.unnamed) {
      unnamed_.insert(slot.get());
    }
  }

  void add(const std::string& fqn, const nn::ModuleBase& module) {
    for (std::size_t i = 0; i < plan_.applications.size(); ++i) {
      const Application& application = plan_.applications[i];
      if (application.target.module == &module) {
        add_style(fqn, application, i);
      }
    }
    add_unnamed(fqn, module);
  }

  NumberedTable take() { return std::move(made_); }

 private:
  void add_style(const std::string& fqn, const Application& application, std::size_t number) {
    made_.applications.emplace(made_.table.rows.size(), number);
    PlanRow& row = made_.table.rows.emplace_back(PlanRow{fqn, application.style->name(), {}, {}});
    for (const auto& [slot, placement] : application.parameters) {
      row.parameters.push_back(
          planned(name_in(*application.target.module, slot), *slot, placement));
    }
  }

  void add_unnamed(const std::string& fqn, const nn::ModuleBase& module) {
    PlanRow row{fqn, "no entry", {}, {}};
    for (const auto& [name, slot] : module.slots()) {
      if (!placed_.contains(slot.get())) {
        row.parameters.push_back(planned(name, *slot, placement_without_entry(*slot)));
      }
    }
    if (!row.parameters.empty()) {
      made_.table.rows.push_back(std::move(row));
    }
  }

  /// The placement of an earlier plan, or that of parameters that no plan names; nullopt: it stays
  /// plain.
  std::optional<Placement> placement_without_entry(const nn::ParameterSlot& slot) const {
    const at::Tensor& tensor = slot.persistent();
    if (tessera::is_distributed(tensor) && sharding_spec(tensor).mesh == mesh_) {
      return to_placements(*sharding_spec(tensor).layout, tensor.sizes()).front();
    }
    return unnamed_.contains(&slot) ? std::optional<Placement>(Replicate{}) : std::nullopt;
  }

  /// `placement`: nullopt if the plan does not change it.
  PlannedParameter planned(const std::string& name, const nn::ParameterSlot& slot,
                           const std::optional<Placement>& placement) {
    const at::Tensor& tensor = slot.persistent();
    const Placement used = placement.value_or(Replicate{});
    const LayoutPtr layout = to_layout({mesh_.size()}, {used}, tensor.sizes());
    const std::vector<std::int64_t> coordinate{mesh_.local_rank()};
    PlannedParameter parameter{.name = name,
                               .placement = placement ? tessera::to_string(used) : "plain",
                               .sizes = tensor.sizes().vec(),
                               .local_sizes = local_sizes(*layout, tensor.sizes(), coordinate),
                               .bytes = bytes_at(*layout, tensor, mesh_.local_rank()),
                               .shared = !seen_.insert(&slot).second};
    parameter.smallest_bytes = parameter.largest_bytes = parameter.bytes;
    for (std::int64_t rank = 0; rank < mesh_.size(); ++rank) {
      const std::int64_t bytes = bytes_at(*layout, tensor, rank);
      parameter.smallest_bytes = std::min(parameter.smallest_bytes, bytes);
      parameter.largest_bytes = std::max(parameter.largest_bytes, bytes);
    }
    return parameter;
  }

  static std::string name_in(const nn::ModuleBase& module, const nn::SlotPtr& slot) {
    const nn::NamedSlots slots = module.named_slots();
    const auto found = std::ranges::find(slots, slot, &nn::NamedSlots::value_type::second);
    return found == slots.end() ? "" : found->first;
  }

  const CheckedPlan& plan_;
  const DeviceMesh& mesh_;
  std::unordered_set<const nn::ParameterSlot*> placed_, unnamed_, seen_;
  NumberedTable made_;
};

NumberedTable table_of(nn::ModuleBase& module, const DeviceMesh& mesh, const CheckedPlan& plan) {
  RowMaker maker(plan, mesh);
  nn::visit_modules(module, [&maker](const std::string& fqn, const nn::ModuleBase& each) {
    maker.add(fqn, each);
  });
  NumberedTable made = maker.take();
  made.table.mesh = tessera::to_string(mesh);
  made.table.rank = static_cast<int>(mesh.local_rank());
  return made;
}

/// Parameters and buffers on the meta device count as filled while this lives: a call of their
/// module computes shapes.
class FilledOnMeta {
 public:
  explicit FilledOnMeta(const nn::ModuleBase& module) {
    for (const auto& slots : {module.named_slots(), module.named_buffer_slots()}) {
      for (const auto& [name, slot] : slots) {
        if (slot->get().is_meta() && !slot->initialized()) {
          nn::mark_initialized(slot);
          marked_.push_back(slot);
        }
      }
    }
  }
  FilledOnMeta(const FilledOnMeta&) = delete;
  FilledOnMeta& operator=(const FilledOnMeta&) = delete;
  ~FilledOnMeta() {
    for (const nn::SlotPtr& slot : marked_) {
      slot->set_initialized(false);
    }
  }

 private:
  std::vector<nn::SlotPtr> marked_;
};

}  // namespace

PlanTable check_plan(nn::ModuleBase& module, const DeviceMesh& mesh, const ParallelizePlan& plan) {
  return table_of(module, mesh, check_entries(module, mesh, plan)).table;
}

struct PlanRecording::State {
  NumberedTable made;
  std::shared_ptr<PlanRecorder> recorder;
};

PlanRecording::PlanRecording(nn::ModuleBase& module, const DeviceMesh& mesh,
                             const ParallelizePlan& plan) {
  const CheckedPlan checked = check_entries(module, mesh, plan);
  state_ = std::make_unique<State>(
      State{table_of(module, mesh, checked), std::make_shared<PlanRecorder>(mesh)});
  apply_plan(checked, module, mesh, state_->recorder);
}

PlanRecording::~PlanRecording() = default;

PlanTable PlanRecording::record(const std::function<void()>& step) {
  state_->recorder->run(step);
  auto& [table, applications] = state_->made;
  for (const auto& [row, application] : applications) {
    table.rows[row].collectives = state_->recorder->of(application);
  }
  table.elsewhere = state_->recorder->elsewhere();
  table.recorded = true;
  return std::move(table);
}

PlanTable record_plan(nn::ModuleBase& module, const DeviceMesh& mesh, const ParallelizePlan& plan,
                      const std::function<void()>& step, const std::function<void()>& prepare) {
  PlanRecording recording(module, mesh, plan);
  const FilledOnMeta filled(module);
  if (prepare) {
    prepare();
  }
  return recording.record(step);
}

}  // namespace tessera::tensor_parallel
