// Styles that only convert the tensors at a module's boundary: prepare_module_input,
// prepare_module_output and both at once. The first two are one class: they convert a list of
// tensors the same way, in different hooks.

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/tensor_parallel/style_helpers.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {
namespace {

using OptionalPlacements = std::vector<std::optional<Placement>>;

void check_lists(const std::string& style, const OptionalPlacements& layouts,
                 const OptionalPlacements& desired) {
  TESSERA_CHECK(layouts.size() == desired.size(), style, " was given ", layouts.size(),
                " placements and ", desired.size(),
                " desired ones; pass as many (nullopt leaves a tensor alone)");
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    TESSERA_CHECK(layouts[i].has_value() == desired[i].has_value(), style,
                  " was given only one of the placement and the desired placement of tensor ", i,
                  "; pass both or neither");
  }
}

// Which of the module's boundaries: it decides the hook and the name in messages.
enum class Side { kInputs, kOutputs };

/// Redistributes the tensors that go into a module's forward, or those that come out of it.
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
    // By value: the module outlives the plan that holds this style.
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
  void convert(const nn::ModuleBase& module, nn::TensorList tensors, const DeviceMesh& mesh) const {
    // Fewer placements than tensors are fine: the rest is left alone.
    TESSERA_CHECK(tensors.size() >= layouts_.size(), name(), " has placements for ",
                  layouts_.size(), " tensors, but the call has ", tensors.size(),
                  "; correct the plan");
    for (std::size_t i = 0; i < layouts_.size(); ++i) {
      if (!layouts_[i]) {
        continue;
      }
      const at::Tensor desired =
          prepare_input(module, *tensors[i], mesh, *layouts_[i], *desired_[i], {}, regather_);
      // The same placement again: this only unwraps, if a local tensor is asked for.
      *tensors[i] = prepare_output(desired, *desired_[i], use_local_);
    }
  }

  Side side_;
  OptionalPlacements layouts_, desired_;
  bool use_local_;
  bool regather_;
};

/// prepare_module_input and prepare_module_output on one module.
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

StylePtr prepare_module_input(PrepareModuleInputOptions options) {
  return std::make_shared<Prepare>(Side::kInputs, std::move(options.input_layouts),
                                   std::move(options.desired_input_layouts),
                                   options.use_local_output, options.regather);
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

StylePtr prepare_module_output(PrepareModuleOutputOptions options) {
  return std::make_shared<Prepare>(Side::kOutputs, std::move(options.output_layouts),
                                   std::move(options.desired_output_layouts),
                                   options.use_local_output);
}

}  // namespace tessera::tensor_parallel
