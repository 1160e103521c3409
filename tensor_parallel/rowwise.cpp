#include <optional>

#include "activations.h"
#include "style_errors.h"
#include "tessera/core/error.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::tensor_parallel {
namespace {

/// The global sizes of a Linear's input whose last dimension is split: the module knows them.
std::optional<std::vector<std::int64_t>> input_sizes(const nn::Linear& linear,
                                                     const at::Tensor& input,
                                                     const Placement& placement) {
  if (!is_shard(placement, -1) && !is_shard(placement, input.dim() - 1)) {
    return std::nullopt;
  }
  std::vector<std::int64_t> sizes = input.sizes().vec();
  sizes.back() = linear.in_features();
  return sizes;
}

/// Splits what a module takes in: the rows of Megatron-LM's x W, or those of a vocabulary. The
/// result is a sum over the mesh, which the output's placement settles.
class Rowwise final : public ParallelStyle {
 public:
  explicit Rowwise(RowwiseOptions options) : options_(std::move(options)) {}

  std::string name() const override { return "rowwise_parallel"; }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    if (dynamic_cast<const nn::Embedding*>(&module) != nullptr) {
      TESSERA_CHECK(
          is_replicate(options_.input),
          "rowwise_parallel of an nn::Embedding takes the same indices on every rank, not ",
          to_string(options_.input), "; pass input = Replicate{}");
      return {{module.slot("weight"), Shard{0}}};
    }
    if (dynamic_cast<const nn::Linear*>(&module) == nullptr) {
      fail_unfit(*this, module, "nn::Linear and nn::Embedding");
    }
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    for (const auto& [name, slot] : module.slots()) {
      placements.emplace_back(slot, name == "weight" ? Placement(Shard{1}) : Replicate{});
    }
    return placements;
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    if (auto* linear = dynamic_cast<nn::Linear*>(&module)) {
      apply_to_linear(*linear, mesh);
    } else {
      apply_to_embedding(module, mesh);
    }
  }

 private:
  void apply_to_linear(nn::Linear& linear, const DeviceMesh& mesh) const {
    linear.set_defer_bias(true);
    linear.add_forward_pre_hook([mesh, options = options_](auto& module, nn::TensorList inputs) {
      const auto& self = static_cast<const nn::Linear&>(module);
      *inputs[0] = enter(*inputs[0], mesh, options.input, Shard{-1},
                         input_sizes(self, *inputs[0], options.input));
    });
    linear.add_forward_hook([options = options_](auto& module, nn::TensorList outputs) {
      const auto& self = static_cast<const nn::Linear&>(module);
      at::Tensor output = leave(*outputs[0], options.output, false);
      if (self.defers_bias()) {
        output = output.add(self.bias);
      }
      *outputs[0] = leave(output, options.output, options.use_local_output);
    });
  }

  void apply_to_embedding(nn::ModuleBase& embedding, const DeviceMesh& mesh) const {
    embedding.add_forward_pre_hook([mesh, options = options_](auto&, nn::TensorList inputs) {
      *inputs[0] = enter(*inputs[0], mesh, options.input, Replicate{});
    });
    embedding.add_forward_hook([options = options_](auto&, nn::TensorList outputs) {
      *outputs[0] = leave(*outputs[0], options.output, options.use_local_output);
    });
  }

  RowwiseOptions options_;
};

}  // namespace

StylePtr rowwise_parallel(RowwiseOptions options) {
  return std::make_shared<Rowwise>(std::move(options));
}

}  // namespace tessera::tensor_parallel
