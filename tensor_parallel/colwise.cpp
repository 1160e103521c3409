#include "activations.h"
#include "style_errors.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::tensor_parallel {
namespace {

/// Splits what a module puts out: the columns of Megatron-LM's x W.
class Colwise final : public ParallelStyle {
 public:
  explicit Colwise(ColwiseOptions options) : options_(std::move(options)) {}

  std::string name() const override { return "colwise_parallel"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    if (dynamic_cast<const nn::Embedding*>(&module) != nullptr) {
      return {{module.slot("weight"), Shard{1}}};
    }
    if (dynamic_cast<const nn::Linear*>(&module) == nullptr) {
      fail_unfit(*this, module, "nn::Linear and nn::Embedding");
    }
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    for (const auto& [name, slot] : module.slots()) {
      placements.emplace_back(slot, Shard{0});
    }
    return placements;
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    module.add_forward_pre_hook([mesh, options = options_](auto&, nn::TensorList inputs) {
      *inputs[0] = enter(*inputs[0], mesh, options.input, Replicate{});
    });
    module.add_forward_hook([options = options_](auto&, nn::TensorList outputs) {
      *outputs[0] = leave(*outputs[0], options.output, options.use_local_output);
    });
  }

 private:
  ColwiseOptions options_;
};

}  // namespace

StylePtr colwise_parallel(ColwiseOptions options) {
  return std::make_shared<Colwise>(std::move(options));
}

}  // namespace tessera::tensor_parallel
