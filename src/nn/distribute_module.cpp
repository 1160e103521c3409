#include "tessera/nn/distribute_module.h"

#include <c10/core/GradMode.h>

#include <memory>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/retired_parameter.h"

namespace tessera::nn {
namespace {

/// Attached to a module that was distributed.
struct Distributed {
  DeviceMesh mesh;
};

template <class Function>
void visit_modules(const std::string& name, torch::nn::Module& module, const Function& function) {
  if (auto* ours = dynamic_cast<ModuleBase*>(&module)) function(name, *ours);
  for (const auto& child : module.named_children()) {
    visit_modules(name.empty() ? child.key() : name + "." + child.key(), *child.value(), function);
  }
}

void replicate_leftovers(const NamedSlots& slots, const DeviceMesh& mesh) {
  const Placements whole(static_cast<std::size_t>(mesh.ndim()), Replicate{});
  for (const auto& [name, slot] : slots) {
    if (!tessera::is_distributed(slot->get())) distribute_parameter(*slot, mesh, whole);
  }
}

}  // namespace

void distribute_parameter(ParameterSlot& slot, const DeviceMesh& mesh, const Placements& placements,
                          const std::string& by) {
  TESSERA_CHECK(!slot.has_persistent(), by,
                ": the parameter belongs to an FSDP unit; distribute it before fully_shard");
  const c10::AutoGradMode no_grad(false);
  const at::Tensor whole = slot.get().detach();
  const DistributedTensor split = distribute_tensor(whole, mesh, placements);
  // A slice would keep the whole alive.
  at::Tensor local = local_tensor(split);
  if (local.numel() < whole.numel()) local = local.clone(at::MemoryFormat::Contiguous);
  at::Tensor parameter = make_distributed(local, split.spec(), whole.sizes().vec());
  if (slot.get().requires_grad()) {
    parameter.requires_grad_();
    retire_parameter(slot.get(), by);
  }
  slot.set(std::move(parameter));
}

void distribute_module(ModuleBase& module, const DeviceMesh& mesh,
                       const PartitionFunction& partition, const BoundaryFunction& input,
                       const BoundaryFunction& output) {
  const auto before = module.attached<Distributed>();
  TESSERA_CHECK(before == nullptr, "distribute_module: the module was distributed on ",
                to_string(before ? before->mesh : mesh), " already; distribute it once");
  const NamedSlots parameters = module.named_slots();
  if (partition) {
    visit_modules("", module,
                  [&](const std::string& name, ModuleBase& each) { partition(name, each, mesh); });
  }
  replicate_leftovers(parameters, mesh);
  replicate_leftovers(module.named_buffer_slots(), mesh);
  if (input) {
    module.add_forward_pre_hook(
        [input, mesh](ModuleBase&, TensorList tensors) { input(tensors, mesh); });
  }
  if (output) {
    module.add_forward_hook(
        [output, mesh](ModuleBase&, TensorList tensors) { output(tensors, mesh); });
  }
  module.attach(std::make_shared<Distributed>(Distributed{mesh}));
}

}  // namespace tessera::nn
