// Conversions of tensors at a module's boundary: the functions that the hooks of all styles share
// (style_helpers.h), and the styles that only convert.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gathered_input.h"
#include "replica_check.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/lora.h"
#include "tessera/tensor_parallel/detail/style_checks.h"
#include "tessera/tensor_parallel/style_helpers.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {
namespace {

at::Tensor redistribute_to(const DistributedTensor& tensor, const Placement& desired,
                           bool regather = false) {
  const ShardingSpec& spec = tensor.spec();
  const LayoutPtr layout = to_layout(spec.layout->mesh_sizes(), {desired}, tensor.tensor().sizes());
  // Returns early if the layout does not change, to save an autograd node that does nothing.
  if (spec.layout == layout) {
    return tensor.tensor();
  }
  const bool gathers = spec.layout->sharded_dim(0) >= 0 && layout->is_replicated();
  return regather && gathers ? gather_again_in_backward(tensor)
                             : tensor.redistribute(layout).tensor();
}

/// Makes a distributed tensor with the placement `layout` from a plain tensor.
DistributedTensor from_plain(const nn::ModuleBase& module, const at::Tensor& tensor,
                             const DeviceMesh& mesh, const Placement& layout,
                             std::optional<std::vector<std::int64_t>> sizes) {
  const auto replicas = module.attached<ReplicaCheck>();
  if (replicas != nullptr && is_replicate(layout)) {
    replicas->check_input(module, tensor);
  }
  const auto* shard = std::get_if<Shard>(&layout);
  const bool in_range =
      shard != nullptr && shard->dim >= -tensor.dim() && shard->dim < tensor.dim();
  if (in_range && !sizes) {
    sizes = detail::agreed_sizes(replicas != nullptr ? replicas->name_of(module) : module.name(),
                                 tensor, mesh, {layout});
  }
  return DistributedTensor::from_local(tensor, mesh, {layout}, std::move(sizes));
}

/// Whether `module` is an nn::Hooked that wraps an M, or represents an M inside an nn::Hooked.
template <class M>
bool wraps(const nn::ModuleBase& module) {
  const auto* holder = dynamic_cast<const nn::detail::AdoptsModule*>(&module);
  return holder != nullptr && dynamic_cast<const M*>(&holder->adopted_module()) != nullptr;
}

using OptionalPlacements = std::vector<std::optional<Placement>>;

void check_lists(const std::string& style, const OptionalPlacements& layouts,
                 const OptionalPlacements& desired) {
  TESSERA_CHECK(layouts.size() == desired.size(), style, " was given ", layouts.size(),
                " placements and ", desired.size(),
                " desired placements; pass as many of both (nullopt leaves a tensor unchanged)");
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    TESSERA_CHECK(layouts[i].has_value() == desired[i].has_value(), style, ": tensor ", i,
                  " has only one of its placement and its desired placement; pass both or neither");
  }
}

enum class Side { kInputs, kOutputs };

/// The style that redistributes tensors among a module's arguments or results.
class Prepare final : public ParallelStyle {
 public:
  Prepare(Side side, OptionalPlacements layouts, OptionalPlacements desired, bool use_local,
          bool regather = false)
      : side_(side),
        layouts_(std::move(layouts)),
        desired_(std::move(desired)),
        use_local_(use_local),
        regather_(regather) {
    check_lists(name(), layouts_, desired_);
  }

  std::string name() const override {
    return side_ == Side::kInputs ? "prepare_module_input" : "prepare_module_output";
  }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(const nn::ModuleBase&) const override {
    return {};
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    // The hook has a copy of the style, because the module may outlive the plan.
    const auto hook = [mesh, style = *this](auto& self, nn::TensorList tensors) {
      style.convert(self, tensors, mesh);
    };
    if (side_ == Side::kInputs) {
      module.add_forward_pre_hook(hook);
    } else {
      module.add_forward_hook(hook);
    }
  }

 private:
  /// Converts one tensor for each placement. Tensors beyond the last placement stay unchanged.
  void convert(const nn::ModuleBase& module, nn::TensorList tensors, const DeviceMesh& mesh) const {
    TESSERA_CHECK(tensors.size() >= layouts_.size(), name(), " has placements for ",
                  layouts_.size(), " tensors, but the call has ", tensors.size(),
                  "; correct the plan");
    for (std::size_t i = 0; i < layouts_.size(); ++i) {
      if (!layouts_[i]) {
        continue;
      }
      const at::Tensor desired =
          prepare_input(module, *tensors[i], mesh, *layouts_[i], *desired_[i], {}, regather_);
      *tensors[i] = prepare_output(desired, *desired_[i], use_local_);
    }
  }

  Side side_;
  OptionalPlacements layouts_, desired_;
  bool use_local_;
  bool regather_;
};

class PrepareBoth final : public ParallelStyle {
 public:
  PrepareBoth(StylePtr inputs, StylePtr outputs)
      : inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

  std::string name() const override { return "prepare_module_input_output"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(const nn::ModuleBase&) const override {
    return {};
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    inputs_->apply(module, mesh);
    outputs_->apply(module, mesh);
  }

 private:
  StylePtr inputs_, outputs_;
};

}  // namespace

at::Tensor prepare_input(const nn::ModuleBase& module, const at::Tensor& tensor,
                         const DeviceMesh& mesh, const Placement& layout, const Placement& desired,
                         std::optional<std::vector<std::int64_t>> sizes, bool regather) {
  TESSERA_CHECK(tensor.defined(), "a tensor-parallel style of a ", module.name(),
                " was given an undefined tensor; remove the tensor from the plan");
  if (!tessera::is_distributed(tensor)) {
    return redistribute_to(from_plain(module, tensor, mesh, layout, std::move(sizes)), desired,
                           regather);
  }
  const DistributedTensor distributed(tensor);
  TESSERA_CHECK(distributed.mesh() == mesh, "a tensor-parallel style of a ", module.name(), " on ",
                to_string(mesh), " was given a tensor on ", to_string(distributed.mesh()),
                "; pass a tensor on the mesh of the style, or its to_local()");
  return redistribute_to(distributed, desired, regather);
}

at::Tensor prepare_output(const at::Tensor& tensor, const Placement& layout,
                          bool use_local_output) {
  const at::Tensor output = redistribute_to(DistributedTensor(tensor), layout);
  return use_local_output ? DistributedTensor(output).to_local() : output;
}

bool is_linear(const nn::ModuleBase& module) {
  return dynamic_cast<const nn::Linear*>(&module) != nullptr ||
         wraps<torch::nn::LinearImpl>(module);
}

bool is_embedding(const nn::ModuleBase& module) {
  return dynamic_cast<const nn::Embedding*>(&module) != nullptr ||
         wraps<torch::nn::EmbeddingImpl>(module);
}

void place_adapter(const nn::ModuleBase& linear, const Placement& a, const Placement& b,
                   std::vector<std::pair<nn::SlotPtr, Placement>>& placements) {
  if (const auto lora = linear.attached<nn::LoraBranch>()) {
    placements.emplace_back(lora->a->weight.slot(), a);
    placements.emplace_back(lora->b->weight.slot(), b);
  }
}

void check_heads(const ParallelStyle& style, std::int64_t heads, std::int64_t features,
                 const DeviceMesh& mesh) {
  TESSERA_CHECK(heads >= 0 && (heads == 0 || features % heads == 0), style.name(), ": ", features,
                " features are not .heads = ", heads, " heads of equal size; correct .heads");
  TESSERA_CHECK(heads % mesh.size() == 0, style.name(), ": ", mesh.size(), " ranks do not divide ",
                heads, " heads; choose a tensor-parallel size that divides them");
}

void fail_unfit(const ParallelStyle& style, const nn::ModuleBase& module, const char* fits) {
  fail(style.name(), " is for ", fits, ", but the module is a ", module.name());
}

StylePtr prepare_module_input(PrepareModuleInputOptions options) {
  return std::make_shared<Prepare>(Side::kInputs, std::move(options.input_layouts),
                                   std::move(options.desired_input_layouts),
                                   options.use_local_output, options.regather);
}

StylePtr prepare_module_output(PrepareModuleOutputOptions options) {
  return std::make_shared<Prepare>(Side::kOutputs, std::move(options.output_layouts),
                                   std::move(options.desired_output_layouts),
                                   options.use_local_output);
}

StylePtr prepare_module_input_output(PrepareModuleInputOutputOptions options) {
  return std::make_shared<PrepareBoth>(
      prepare_module_input({.input_layouts = std::move(options.input_layouts),
                            .desired_input_layouts = std::move(options.desired_input_layouts),
                            .use_local_output = options.use_local_input}),
      prepare_module_output({.output_layouts = std::move(options.output_layouts),
                             .desired_output_layouts = std::move(options.desired_output_layouts),
                             .use_local_output = options.use_local_output}));
}

}  // namespace tessera::tensor_parallel
