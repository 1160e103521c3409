// Row-wise parallel linear layers and embeddings: each rank computes a term of the whole output
// from its part of the input features, or of the vocabulary. The terms are summed by the
// redistribution to output_layouts: an all-reduce, or a reduce-scatter into a sequence-parallel
// region.

#include <optional>

#include "gathered_input.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/deferred_bias.h"
#include "tessera/tensor_parallel/style_helpers.h"
#include "tessera/tensor_parallel/styles.h"

namespace tessera::tensor_parallel {
namespace {

/// The layout that a plain input is assumed to have.
Placement layout_of_plain(const RowwiseOptions& options) {
  return options.input_layouts.value_or(Replicate{});
}

/// The global sizes of a Linear's plain input whose last dimension is sharded. The module knows
/// them, the local tensor does not where the shards are uneven. nullopt: the last dimension is not
/// sharded.
std::optional<std::vector<std::int64_t>> input_sizes(const nn::ModuleBase& linear,
                                                     const at::Tensor& input,
                                                     const Placement& placement) {
  if (!is_shard(placement, -1) && !is_shard(placement, input.dim() - 1)) {
    return std::nullopt;
  }
  // Only the last dimension may be uneven; the others are whole on this rank.
  std::vector<std::int64_t> sizes = input.sizes().vec();
  sizes.back() = linear.slot("weight")->get().size(1);
  return sizes;
}

/// A plain tensor from an earlier style (use_local_output) is a part; only the caller can say so.
void check_features(const nn::ModuleBase& linear, const at::Tensor& input,
                    const RowwiseOptions& options) {
  const std::int64_t features = linear.slot("weight")->get().size(1);
  TESSERA_CHECK(
      tessera::is_distributed(input) || options.input_layouts || !input.defined() ||
          input.dim() == 0 || input.size(-1) == features,
      "rowwise_parallel: a Linear of ", features,
      " input features was given the plain "
      "tensor ",
      input.sizes(),
      "; a plain tensor is the same on every rank: hand it on "
      "distributed (use_local_output = false in the style before), or say what part it is "
      "with input_layouts = Shard{-1}");
}

/// Shards the input features of a module: the rows of W in Megatron-LM's x W, or the rows of a
/// vocabulary. The result is a sum over the mesh (Partial), which output_layouts reduces.
class Rowwise final : public ParallelStyle {
 public:
  explicit Rowwise(RowwiseOptions options) : options_(options) {}

  std::string name() const override { return "rowwise_parallel"; }
  /// By default the product's terms are summed where the next operator needs the sum.
  bool adds_hooks() const override {
    return options_.input_layouts || !is_replicate(options_.output_layouts) ||
           options_.use_local_output;
  }

  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    if (is_embedding(module)) {
      const Placement indices = layout_of_plain(options_);
      TESSERA_CHECK(is_replicate(indices),
                    "rowwise_parallel of an Embedding takes the same indices on every rank, not ",
                    to_string(indices), "; leave out input_layouts");
      return {{module.slot("weight"), Shard{0}}};
    }
    if (!is_linear(module)) {
      fail_unfit(*this, module, "Linear and Embedding");
    }
    std::vector<std::pair<nn::SlotPtr, Placement>> placements;
    for (const auto& [name, slot] : module.slots()) {
      // The bias is added once, after the sum, so that every rank needs all of it.
      placements.emplace_back(slot, name == "weight" ? Placement(Shard{1}) : Replicate{});
    }
    place_adapter(module, Shard{1}, Replicate{}, placements);
    return placements;
  }

  void check(const nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    TESSERA_CHECK(options_.heads == 0 || is_linear(module), name(), ": .heads = ", options_.heads,
                  " are those of a Linear's input, but this is a ", module.name(),
                  "; leave them out");
    check_heads(*this, options_.heads, module.slot("weight")->get().size(1), mesh);
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    if (is_linear(module)) {
      apply_to_linear(module, mesh);
    } else {
      apply_to_embedding(module, mesh);
    }
  }

 private:
  void apply_to_linear(nn::ModuleBase& linear, const DeviceMesh& mesh) const {
    // at::linear would add it to each rank's term.
    dynamic_cast<nn::detail::DeferredBias&>(linear).set_defer_bias(true);
    linear.add_forward_pre_hook([mesh, options = options_](auto& module, nn::TensorList inputs) {
      check_features(module, *inputs[0], options);
      const Placement plain = layout_of_plain(options);
      *inputs[0] = prepare_input(module, *inputs[0], mesh, plain, Shard{-1},
                                 input_sizes(module, *inputs[0], plain));
    });
    const bool has_bias = linear.slots().size() > 1;
    linear.add_forward_hook([options = options_, has_bias](auto& module, nn::TensorList outputs) {
      at::Tensor output = prepare_output(*outputs[0], options.output_layouts, false);
      // After the reduction, which would add the bias once for each rank.
      if (has_bias) {
        output = output.add(module.slot("bias")->get());
      }
      *outputs[0] = prepare_output(output, options.output_layouts, options.use_local_output);
    });
  }

  void apply_to_embedding(nn::ModuleBase& embedding, const DeviceMesh& mesh) const {
    // Every rank has all indices. It looks up those in its rows and gives zeros for the others, so
    // the results are terms of a sum.
    add_gathering_hook(embedding, mesh, layout_of_plain(options_), /*regather=*/false);
    embedding.add_forward_hook([options = options_](auto&, nn::TensorList outputs) {
      *outputs[0] = prepare_output(*outputs[0], options.output_layouts, options.use_local_output);
    });
  }

  RowwiseOptions options_;
};

}  // namespace

StylePtr rowwise_parallel(RowwiseOptions options) {
  return std::make_shared<Rowwise>(options);
}

}  // namespace tessera::tensor_parallel
