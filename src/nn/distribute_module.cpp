// Makes a module's parameters distributed without a plan: PyTorch's distribute_module, and
// distribute_parameter, which tensor parallelism uses for each parameter that its styles place.

#include "tessera/nn/distribute_module.h"

#include <c10/core/GradMode.h>

#include <memory>
#include <utility>

#include "tessera/core/detail/environment_switch.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/origins.h"
#include "tessera/nn/detail/retired_parameter.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::nn {
namespace {

/// Attached to a module that was distributed.
// It marks a first call, to find a second; the mesh is for the message.
struct Distributed {
  DeviceMesh mesh;
};

/// For what the partition function left: operators do not mix plain and distributed tensors.
void replicate_leftovers(const NamedSlots& slots, const DeviceMesh& mesh) {
  const Placements whole(static_cast<std::size_t>(mesh.ndim()), Replicate{});
  for (const auto& [name, slot] : slots) {
    if (!tessera::is_distributed(slot->get())) {
      distribute_parameter(*slot, mesh, whole);
    }
  }
}

/// With TESSERA_DEBUG=1: a parameter that is not filled has other bytes on each rank, and so counts
/// as undefined.
void compare_values(const ParameterSlot& slot, const DeviceMesh& mesh, const std::string& by) {
  if (tessera::detail::debug_checks()) {
    tessera::detail::check_replicas(
        tessera::detail::peers_of(mesh),
        {{"the parameter", slot.initialized() ? slot.get().detach() : at::Tensor()}},
        tessera::detail::Equality::kBitwise, by, "give it the same values on every rank");
  }
}

}  // namespace

void distribute_parameter(ParameterSlot& slot, const DeviceMesh& mesh, const Placements& placements,
                          const std::string& by) {
  TESSERA_CHECK(!slot.has_persistent(), by,
                ": the parameter belongs to an FSDP unit; distribute it before fully_shard");
  const c10::AutoGradMode no_grad(false);
  compare_values(slot, mesh, by);
  const at::Tensor whole = slot.get().detach();
  const auto replicated = Layout::replicated(mesh.shape().sizes(), static_cast<int>(whole.dim()));
  const DistributedTensor split =
      DistributedTensor(make_distributed(whole, {mesh, replicated}, whole.sizes().vec()))
          .redistribute(placements);
  // A slice would keep the memory of the whole parameter alive.
  at::Tensor local = local_tensor(split);
  if (local.numel() < whole.numel()) {
    local = local.clone(at::MemoryFormat::Contiguous);
  }
  at::Tensor parameter = make_distributed(local, split.spec(), whole.sizes().vec());
  if (slot.get().requires_grad()) {
    // A new leaf. Another holder of the old one (a stock optimizer) must not train it unnoticed.
    parameter.requires_grad_();
    retire_parameter(slot.get(), parameter, by);
  }
  const bool is_part = local.numel() < whole.numel() && slot.initialized() && !whole.is_meta();
  slot.swap(std::move(parameter));
  if (is_part) {
    detail::note_origin(slot, detail::origin_of_values(whole));
  }
}

void distribute_module(ModuleBase& module, const DeviceMesh& mesh,
                       const PartitionFunction& partition, const BoundaryFunction& input,
                       const BoundaryFunction& output) {
  const auto before = module.attached<Distributed>();
  TESSERA_CHECK(before == nullptr, "distribute_module: the module was distributed on ",
                to_string(before ? before->mesh : mesh), " already; distribute it once");
  // Before the partition function, so that a module without slots is refused before anything is
  // changed.
  const NamedSlots parameters = module.named_slots();
  if (partition) {
    // At every place: the function may know any of a shared module's FQNs.
    visit_modules(module,
                  [&](const std::string& fqn, ModuleBase& each) { partition(fqn, each, mesh); },
                  {.every_place = true});
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
