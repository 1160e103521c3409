#include "tessera/tensor_parallel/parallelize.h"

#include <unordered_map>

#include "pending_gradients.h"
#include "plan_matching.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::tensor_parallel {
namespace {

struct Application {
  NamedModule target;
  StylePtr style;
};

std::string describe(const NamedModule& target) {
  return target.fqn.empty() ? "the root module" : "'" + target.fqn + "'";
}

/// How each parameter is to lie, and who said so. A tied parameter may be placed by several modules
/// if they agree; a module's parameters may be placed by one style only.
class PlacementTable {
 public:
  explicit PlacementTable(const DeviceMesh& mesh) : mesh_(mesh) {}

  void add(const Application& application) {
    const auto placements = application.style->parameters(*application.target.module);
    if (placements.empty()) {
      return;
    }
    const auto [owner, first] = styles_.emplace(application.target.module, application.style);
    TESSERA_CHECK(first, "parallelize_module: two entries of the plan place the parameters of ",
                  describe(application.target), ", ", owner->second->name(), " and ",
                  application.style->name(), "; keep one");
    for (const auto& [slot, placement] : placements) {
      add_slot(application, slot, placement);
    }
  }

  void distribute() const {
    for (const nn::SlotPtr& slot : order_) {
      if (!tessera::is_distributed(slot->get())) {
        nn::distribute_parameter(*slot, mesh_, {wanted_.at(slot.get())}, "parallelize_module");
      }
    }
  }

 private:
  void add_slot(const Application& application, const nn::SlotPtr& slot,
                const Placement& placement) {
    check_slot(application, *slot, placement);
    const auto [known, first] = wanted_.emplace(slot.get(), placement);
    TESSERA_CHECK(known->second == placement, "parallelize_module: ", application.style->name(),
                  " places a parameter of ", describe(application.target), " as ",
                  to_string(placement), ", but a module that shares it has placed it as ",
                  to_string(known->second), "; tied parameters need one placement");
    if (first) {
      order_.push_back(slot);
    }
  }

  void check_slot(const Application& application, const nn::ParameterSlot& slot,
                  const Placement& placement) const {
    TESSERA_CHECK(!slot.has_persistent(), "parallelize_module: the parameters of ",
                  describe(application.target),
                  " belong to an FSDP unit; call parallelize_module before fully_shard");
    const at::Tensor& tensor = slot.get();
    // Throws for a placement that the tensor's sizes do not allow.
    const LayoutPtr layout = to_layout({mesh_.size()}, {placement}, tensor.sizes());
    if (!tessera::is_distributed(tensor)) {
      return;
    }
    const ShardingSpec& spec = sharding_spec(tensor);
    const bool tied = slot.owners().size() > 1;
    TESSERA_CHECK(tied && spec.mesh == mesh_ && spec.layout == layout,
                  "parallelize_module: a parameter of ", describe(application.target),
                  " is distributed already, as ", to_string(*spec.layout), " on ",
                  to_string(spec.mesh), "; parallelize a module once");
  }

  const DeviceMesh& mesh_;
  std::unordered_map<const nn::ModuleBase*, StylePtr> styles_;
  std::unordered_map<const nn::ParameterSlot*, Placement> wanted_;
  std::vector<nn::SlotPtr> order_;
};

/// Parameters that the style replicates may get their gradients in terms. At every call, because
/// the tensors in the slots change (nn::to_empty, FSDP).
void watch_replicated(const Application& application,
                      const std::shared_ptr<PendingGradients>& pending) {
  std::vector<nn::SlotPtr> slots;
  for (const auto& [slot, placement] : application.style->parameters(*application.target.module)) {
    if (is_replicate(placement)) {
      slots.push_back(slot);
    }
  }
  if (!slots.empty()) {
    application.target.module->add_forward_pre_hook(
        [pending, slots](auto&, nn::TensorList) { pending->watch(slots); });
  }
}

}  // namespace

void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh, const Plan& plan) {
  TESSERA_CHECK(mesh && mesh.ndim() == 1, "parallelize_module: the mesh is ",
                mesh ? to_string(mesh) : "undefined",
                "; pass one dimension of it, for example mesh[\"tp\"]");
  std::vector<Application> applications;
  PlacementTable placements(mesh);
  for (const auto& [pattern, style] : plan) {
    for (const NamedModule& target : match_modules(module, pattern)) {
      applications.push_back({target, style});
      placements.add(applications.back());
    }
  }
  placements.distribute();
  const auto pending = std::make_shared<PendingGradients>();
  for (const Application& application : applications) {
    watch_replicated(application, pending);
    application.style->apply(*application.target.module, mesh);
  }
}

}  // namespace tessera::tensor_parallel
