// Converts a module's tensors to the placements that a style wants. A plain tensor becomes
// distributed: it is the same on every rank, unless the plan says which part it is.

#include "tessera/tensor_parallel/style_helpers.h"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "equal_copies.h"
#include "gathered_input.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/lora.h"

namespace tessera::tensor_parallel {
namespace {

at::Tensor redistribute_to(const DistributedTensor& tensor, const Placement& desired,
                           bool regather = false) {
  const ShardingSpec& spec = tensor.spec();
  const LayoutPtr layout = to_layout(spec.layout->mesh_sizes(), {desired}, tensor.tensor().sizes());
  // Layouts are interned. Without the comparison autograd would get a node that does nothing.
  if (spec.layout == layout) {
    return tensor.tensor();
  }
  const bool gathers = spec.layout->sharded_dim(0) >= 0 && layout->is_replicated();
  return regather && gathers ? gather_again_in_backward(tensor)
                             : tensor.redistribute(layout).tensor();
}

/// Makes a plain tensor distributed, with the layout that the style assumes.
DistributedTensor from_plain(const nn::ModuleBase& module, const at::Tensor& tensor,
                             const DeviceMesh& mesh, const Placement& layout,
                             std::optional<std::vector<std::int64_t>> sizes) {
  const auto copies = module.attached<EqualCopies>();
  if (copies != nullptr && is_replicate(layout)) {
    copies->check_input(module, tensor);
  }
  const auto* shard = std::get_if<Shard>(&layout);
  const bool in_range =
      shard != nullptr && shard->dim >= -tensor.dim() && shard->dim < tensor.dim();
  if (in_range && !sizes) {
    sizes = detail::agreed_sizes(copies != nullptr ? copies->name_of(module) : module.name(),
                                 tensor, mesh, {layout});
  }
  return DistributedTensor::from_local(tensor, mesh, {layout}, std::move(sizes));
}

/// In nn::Hooked, or inside of what one holds.
template <class M>
bool holds(const nn::ModuleBase& module) {
  const auto* holder = dynamic_cast<const nn::detail::AdoptsModule*>(&module);
  return holder != nullptr && dynamic_cast<const M*>(&holder->adopted_module()) != nullptr;
}

}  // namespace

at::Tensor prepare_input(const nn::ModuleBase& module, const at::Tensor& tensor,
                         const DeviceMesh& mesh, const Placement& layout, const Placement& desired,
                         std::optional<std::vector<std::int64_t>> sizes, bool regather) {
  TESSERA_CHECK(tensor.defined(),
                "a tensor-parallel style was given an undefined tensor; leave it out of the plan");
  if (!tessera::is_distributed(tensor)) {
    return redistribute_to(from_plain(module, tensor, mesh, layout, std::move(sizes)), desired,
                           regather);
  }
  const DistributedTensor distributed(tensor);
  // The placement of a distributed tensor is known: `layout` is for plain ones.
  TESSERA_CHECK(distributed.mesh() == mesh, "a tensor-parallel style on ", to_string(mesh),
                " was given a tensor on ", to_string(distributed.mesh()),
                "; pass a tensor of the style's mesh, or its to_local()");
  return redistribute_to(distributed, desired, regather);
}

at::Tensor prepare_output(const at::Tensor& tensor, const Placement& layout,
                          bool use_local_output) {
  const at::Tensor output = redistribute_to(DistributedTensor(tensor), layout);
  return use_local_output ? DistributedTensor(output).to_local() : output;
}

bool is_linear(const nn::ModuleBase& module) {
  return dynamic_cast<const nn::Linear*>(&module) != nullptr ||
         holds<torch::nn::LinearImpl>(module);
}

void place_adapter(const nn::ModuleBase& linear, const Placement& a, const Placement& b,
                   std::vector<std::pair<nn::SlotPtr, Placement>>& placements) {
  if (const auto lora = linear.attached<nn::LoraBranch>()) {
    placements.emplace_back(lora->a->weight.slot(), a);
    placements.emplace_back(lora->b->weight.slot(), b);
  }
}

bool is_embedding(const nn::ModuleBase& module) {
  return dynamic_cast<const nn::Embedding*>(&module) != nullptr ||
         holds<torch::nn::EmbeddingImpl>(module);
}

void check_heads(const ParallelStyle& style, std::int64_t heads, std::int64_t features,
                 const DeviceMesh& mesh) {
  TESSERA_CHECK(heads >= 0 && (heads == 0 || features % heads == 0), style.name(), ": ", features,
                " features are not ", heads, " heads of equal size; correct .heads");
  TESSERA_CHECK(heads % mesh.size() == 0, style.name(), ": ", heads,
                " heads cannot be shared out to ", mesh.size(),
                " ranks, each with whole ones; take a tensor-parallel size that divides them");
}

void fail_unfit(const ParallelStyle& style, const nn::ModuleBase& module, const char* fits) {
  fail(style.name(), " is for ", fits, ", but was asked for a ", module.name());
}

}  // namespace tessera::tensor_parallel
