#include "activations.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::tensor_parallel {
namespace {

/// Korthikanti et al. 2022: what acts on each token alone runs on a part of the sequence.
class Sequence final : public ParallelStyle {
 public:
  explicit Sequence(SequenceOptions options) : options_(options) {}

  std::string name() const override { return "sequence_parallel"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    for (const auto& [name, slot] : module.named_slots()) {
      placements.emplace_back(slot, Replicate{});
    }
    return placements;
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    const Placement split = Shard{options_.sequence_dim};
    module.add_forward_pre_hook([mesh, split](auto&, nn::TensorList inputs) {
      *inputs[0] = enter(*inputs[0], mesh, split, split);
    });
    module.add_forward_hook([options = options_, split](auto&, nn::TensorList outputs) {
      *outputs[0] = leave(*outputs[0], split, options.use_local_output);
    });
  }

 private:
  SequenceOptions options_;
};

}  // namespace

StylePtr sequence_parallel(SequenceOptions options) {
  return std::make_shared<Sequence>(options);
}

}  // namespace tessera::tensor_parallel
