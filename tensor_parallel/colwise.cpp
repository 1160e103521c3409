// Column-wise parallel linear layers and embeddings: each rank computes some of the output features
// from the whole input. Forward communicates nothing unless the input is sharded or the output is
// wanted in another layout; in backward the input's gradient is a sum over the ranks.

#include "gathered_input.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/fused_linear.h"
#include "tessera/tensor_parallel/style_helpers.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {
namespace {

/// Shards the output features of a module: the columns of W in Megatron-LM's x W.
class Colwise final : public ParallelStyle {
 public:
  explicit Colwise(ColwiseOptions options) : options_(options) {}

  std::string name() const override { return "colwise_parallel"; }
  /// By default a product gathers its input and leaves its result as the hooks would.
  bool adds_hooks() const override {
    return !is_replicate(options_.input_layouts) || !is_shard(options_.output_layouts, -1) ||
           options_.use_local_output;
  }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    if (is_embedding(module)) {
      // (vocabulary, features): an Embedding's output features are its columns.
      return {{module.slot("weight"), Shard{1}}};
    }
    if (!is_linear(module)) {
      fail_unfit(*this, module, "Linear and Embedding");
    }
    TESSERA_CHECK(
        dynamic_cast<const nn::FusedLinear*>(&module) == nullptr, name(),
        " of an nn::FusedLinear would cut across its parts; use fused_colwise_parallel()");
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    for (const auto& [name, slot] : module.slots()) {
      // Weight (out, in) and bias (out) alike: each rank has the bias of its output features.
      placements.emplace_back(slot, Shard{0});
    }
    place_adapter(module, Replicate{}, Shard{0}, placements);
    return placements;
  }

  void check(const nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    // (out, in) of a Linear, (vocabulary, features) of an Embedding.
    check_heads(*this, options_.heads, module.slot("weight")->get().size(is_linear(module) ? 0 : 1),
                mesh);
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    set_regathered_product(module, options_.regather);
    add_gathering_hook(module, mesh, options_.input_layouts, options_.regather);
    module.add_forward_hook([options = options_](auto&, nn::TensorList outputs) {
      // Features are distributed as the weight is. A plain output was computed from them inside, as
      // a loss is.
      if (tessera::is_distributed(*outputs[0])) {
        *outputs[0] = prepare_output(*outputs[0], options.output_layouts, options.use_local_output);
      }
    });
  }

 private:
  ColwiseOptions options_;
};

}  // namespace

StylePtr colwise_parallel(ColwiseOptions options) {
  return std::make_shared<Colwise>(options);
}

}  // namespace tessera::tensor_parallel
