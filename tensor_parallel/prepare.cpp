#include "activations.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::tensor_parallel {
namespace {

using OptionalPlacements = std::vector<std::optional<Placement>>;

void check_lists(const std::string& style, const OptionalPlacements& given,
                 const OptionalPlacements& desired) {
  TESSERA_CHECK(given.size() == desired.size(), style, " was given ", given.size(),
                " placements and ", desired.size(),
                " desired ones; pass as many (nullopt leaves a tensor alone)");
  for (std::size_t i = 0; i < given.size(); ++i) {
    TESSERA_CHECK(given[i].has_value() == desired[i].has_value(), style, " was given only one of ",
                  "the placement and the desired placement of tensor ", i,
                  "; pass both or neither");
  }
}

/// Brings each tensor that has placements to the desired one.
void convert(const std::string& style, nn::TensorList tensors, const DeviceMesh& mesh,
             const OptionalPlacements& given, const OptionalPlacements& desired, bool local) {
  TESSERA_CHECK(tensors.size() >= given.size(), style, " has placements for ", given.size(),
                " tensors, but the call has ", tensors.size(), "; correct the plan");
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (given[i]) {
      *tensors[i] = leave(enter(*tensors[i], mesh, *given[i], *desired[i]), *desired[i], local);
    }
  }
}

class PrepareInput final : public ParallelStyle {
 public:
  explicit PrepareInput(PrepareInputOptions options) : options_(std::move(options)) {
    check_lists(name(), options_.input, options_.desired_input);
  }

  std::string name() const override { return "prepare_module_input"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(const nn::ModuleBase&) const override {
    return {};
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    module.add_forward_pre_hook([mesh, style = name(), options = options_](auto&,
                                                                           nn::TensorList inputs) {
      convert(style, inputs, mesh, options.input, options.desired_input, options.use_local_output);
    });
  }

 private:
  PrepareInputOptions options_;
};

class PrepareOutput final : public ParallelStyle {
 public:
  explicit PrepareOutput(PrepareOutputOptions options) : options_(std::move(options)) {
    check_lists(name(), options_.output, options_.desired_output);
  }

  std::string name() const override { return "prepare_module_output"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(const nn::ModuleBase&) const override {
    return {};
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    module.add_forward_hook(
        [mesh, style = name(), options = options_](auto&, nn::TensorList outputs) {
          convert(style, outputs, mesh, options.output, options.desired_output,
                  options.use_local_output);
        });
  }

 private:
  PrepareOutputOptions options_;
};

}  // namespace

StylePtr prepare_module_input(PrepareInputOptions options) {
  return std::make_shared<PrepareInput>(std::move(options));
}

StylePtr prepare_module_output(PrepareOutputOptions options) {
  return std::make_shared<PrepareOutput>(std::move(options));
}

}  // namespace tessera::tensor_parallel
