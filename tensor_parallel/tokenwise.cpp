#include "activations.h"
#include "tessera/core/error.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::tensor_parallel {
namespace {

/// What acts on each token alone, with all of its parameters on every rank: all ranks compute the
/// same, or each its part of the sequence (Korthikanti et al. 2022).
class Tokenwise final : public ParallelStyle {
 public:
  Tokenwise(std::string name, Placement activations, bool use_local_output)
      : name_(std::move(name)), activations_(activations), use_local_output_(use_local_output) {}

  std::string name() const override { return name_; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    for (const auto& [name, slot] : module.named_slots()) {
      placements.emplace_back(slot, Replicate{});
    }
    return placements;
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    module.add_forward_pre_hook([mesh, lie = activations_](auto& self, nn::TensorList inputs) {
      TESSERA_CHECK(!inputs.empty(), self.name(),
                    " was called without a tensor, but has a style that "
                    "splits its first one; leave it out of the plan");
      *inputs[0] = enter(*inputs[0], mesh, lie, lie);
    });
    module.add_forward_hook(
        [lie = activations_, local = use_local_output_](auto& self, nn::TensorList outputs) {
          TESSERA_CHECK(!outputs.empty(), self.name(),
                        " returned no tensor, but has a style for its "
                        "first one; leave it out of the plan");
          *outputs[0] = leave(*outputs[0], lie, local);
        });
  }

 private:
  std::string name_;
  Placement activations_;
  bool use_local_output_;
};

}  // namespace

StylePtr sequence_parallel(SequenceOptions options) {
  return std::make_shared<Tokenwise>("sequence_parallel", Shard{options.sequence_dim},
                                     options.use_local_output);
}

StylePtr replicate_parallel(ReplicateOptions options) {
  return std::make_shared<Tokenwise>("replicate_parallel", Replicate{}, options.use_local_output);
}

}  // namespace tessera::tensor_parallel
