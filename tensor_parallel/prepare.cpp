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

enum class Side { kInputs, kOutputs };

/// Brings each tensor of one side of a module's call that has placements to the desired one.
class Prepare final : public ParallelStyle {
 public:
  Prepare(Side side, OptionalPlacements given, OptionalPlacements desired, bool use_local)
      : side_(side), given_(std::move(given)), desired_(std::move(desired)), use_local_(use_local) {
    check_lists(name(), given_, desired_);
  }

  std::string name() const override {
    return side_ == Side::kInputs ? "prepare_module_input" : "prepare_module_output";
  }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(const nn::ModuleBase&) const override {
    return {};
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    const auto hook = [mesh, style = *this](auto&, nn::TensorList tensors) {
      style.convert(tensors, mesh);
    };
    if (side_ == Side::kInputs) {
      module.add_forward_pre_hook(hook);
    } else {
      module.add_forward_hook(hook);
    }
  }

 private:
  void convert(nn::TensorList tensors, const DeviceMesh& mesh) const {
    TESSERA_CHECK(tensors.size() >= given_.size(), name(), " has placements for ", given_.size(),
                  " tensors, but the call has ", tensors.size(), "; correct the plan");
    for (std::size_t i = 0; i < given_.size(); ++i) {
      if (!given_[i]) continue;
      const at::Tensor desired = enter(*tensors[i], mesh, *given_[i], *desired_[i]);
      *tensors[i] = leave(desired, *desired_[i], use_local_);
    }
  }

  Side side_;
  OptionalPlacements given_, desired_;
  bool use_local_;
};

}  // namespace

StylePtr prepare_module_input(PrepareInputOptions options) {
  return std::make_shared<Prepare>(Side::kInputs, std::move(options.input),
                                   std::move(options.desired_input), options.use_local_output);
}

StylePtr prepare_module_output(PrepareOutputOptions options) {
  return std::make_shared<Prepare>(Side::kOutputs, std::move(options.output),
                                   std::move(options.desired_output), options.use_local_output);
}

}  // namespace tessera::tensor_parallel
