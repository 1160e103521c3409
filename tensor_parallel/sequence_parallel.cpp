// Styles whose parameters are whole on every rank: sequence_parallel for norms and dropout between
// tensor-parallel regions, and replicate_parallel. Where tokens are sharded, the parameters'
// gradients are terms of a sum over the ranks, which PendingGradients or FSDP completes.

#include "tessera/core/error.h"
#include "tessera/tensor_parallel/style_helpers.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {
namespace {

/// For modules that process each token independently. All parameters are on every rank. The
/// activations are replicated, so that all ranks compute the same, or sharded along the sequence,
/// so that each computes its tokens (Korthikanti et al. 2022).
class ReplicatedParameters final : public ParallelStyle {
 public:
  ReplicatedParameters(std::string name, Placement activations, bool use_local_output)
      : name_(std::move(name)), activations_(activations), use_local_output_(use_local_output) {}

  std::string name() const override { return name_; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    // Includes the modules below: one entry of the plan may name all norms of a block.
    for (const auto& [name, slot] : module.named_slots()) {
      placements.emplace_back(slot, Replicate{});
    }
    return placements;
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    module.add_forward_pre_hook([mesh, layout = activations_](auto& self, nn::TensorList inputs) {
      TESSERA_CHECK(!inputs.empty(), self.name(),
                    " was called without a tensor, but has a style that "
                    "splits its first one; leave it out of the plan");
      *inputs[0] = prepare_input(self, *inputs[0], mesh, Replicate{}, layout);
    });
    module.add_forward_hook(
        [layout = activations_, local = use_local_output_](auto& self, nn::TensorList outputs) {
          TESSERA_CHECK(!outputs.empty(), self.name(),
                        " returned no tensor, but has a style for its "
                        "first one; leave it out of the plan");
          *outputs[0] = prepare_output(*outputs[0], layout, local);
        });
  }

 private:
  std::string name_;
  Placement activations_;
  bool use_local_output_;
};

}  // namespace

StylePtr sequence_parallel(SequenceOptions options) {
  return std::make_shared<ReplicatedParameters>("sequence_parallel", Shard{options.sequence_dim},
                                                options.use_local_output);
}

StylePtr replicate_parallel(ReplicateOptions options) {
  return std::make_shared<ReplicatedParameters>("replicate_parallel", Replicate{},
                                                options.use_local_output);
}

}  // namespace tessera::tensor_parallel
