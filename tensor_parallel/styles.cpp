// The parallel styles: column-wise, row-wise, replicated, and styles that only convert tensors.

#include "tessera/tensor_parallel/styles.h"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>

#include "internal.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/layers.h"

namespace tessera::tensor_parallel {
namespace {

at::Tensor redistribute_to(const DistributedTensor& tensor, const Placement& desired,
                           bool regather = false) {
  const ShardingSpec& spec = tensor.spec();
  const LayoutPtr layout = to_layout(spec.layout->mesh_sizes(), {desired}, tensor.tensor().sizes());
  // If the tensor already has this layout, redistribute() would only add a useless autograd node.
  if (spec.layout == layout) {
    return tensor.tensor();
  }
  const bool gathers = spec.layout->sharded_dim(0) >= 0 && layout->is_replicated();
  return regather && gathers ? gather_again_in_backward(tensor)
                             : tensor.redistribute(layout).tensor();
}

at::Tensor prepare_output(const at::Tensor& tensor, const Placement& layout,
                          bool use_local_output) {
  const at::Tensor output = redistribute_to(DistributedTensor(tensor), layout);
  return use_local_output ? DistributedTensor(output).to_local() : output;
}

DistributedTensor from_plain(const nn::ModuleBase& module, const at::Tensor& tensor,
                             const DeviceMesh& mesh, const Placement& layout,
                             std::optional<std::vector<std::int64_t>> sizes) {
  const auto replicas = module.attached<ReplicaCheck>();
  if (replicas != nullptr && is_replicate(layout)) {
    replicas->check_input(module, tensor);
  }
  const auto* shard = std::get_if<Shard>(&layout);
  const bool in_range =
      shard != nullptr && shard->dim >= -tensor.dim() && shard->dim < tensor.dim();
  if (in_range && !sizes) {
    sizes = detail::agreed_sizes(replicas != nullptr ? replicas->name_of(module) : module.name(),
                                 tensor, mesh, {layout});
  }
  return DistributedTensor::from_local(tensor, mesh, {layout}, std::move(sizes));
}

/// Whether `module` wraps a libtorch module of class M, either as an nn::Hooked or as the
/// AdoptedModule inside an nn::Hooked.
template <class M>
bool wraps(const nn::ModuleBase& module) {
  const auto* holder = dynamic_cast<const nn::detail::AdoptsModule*>(&module);
  return holder != nullptr && dynamic_cast<const M*>(&holder->adopted_module()) != nullptr;
}

/// Whether `module` is an nn::Linear, or a libtorch Linear in an nn::Hooked. Such a module has a
/// `weight`, and possibly a `bias`.
bool is_linear(const nn::ModuleBase& module) {
  return dynamic_cast<const nn::Linear*>(&module) != nullptr ||
         wraps<torch::nn::LinearImpl>(module);
}

/// Whether `module` is an nn::Embedding, or a libtorch Embedding in an nn::Hooked.
bool is_embedding(const nn::ModuleBase& module) {
  return dynamic_cast<const nn::Embedding*>(&module) != nullptr ||
         wraps<torch::nn::EmbeddingImpl>(module);
}

using SlotPlacements = std::vector<std::pair<nn::SlotPtr, Placement>>;

/// Returns the placement `all` for each parameter of `module`, and `a` and `b` for the two matrices
/// of its LoRA adapter, if any (nn::apply_lora).
SlotPlacements placements_of(const nn::ModuleBase& module, const Placement& all, const Placement& a,
                             const Placement& b) {
  SlotPlacements placements;
  for (const auto& [name, slot] : module.slots()) {
    placements.emplace_back(slot, all);
  }
  if (const auto lora = module.attached<nn::LoraBranch>()) {
    placements.emplace_back(lora->a->weight.slot(), a);
    placements.emplace_back(lora->b->weight.slot(), b);
  }
  return placements;
}

/// Throws Error unless `features` can be divided into `heads` heads of equal size and the number of
/// ranks divides `heads`. Does nothing if `heads` is 0.
void check_heads(const ParallelStyle& style, std::int64_t heads, std::int64_t features,
                 const DeviceMesh& mesh) {
  TESSERA_CHECK(heads >= 0 && (heads == 0 || features % heads == 0), style.name(), ": ", features,
                " features cannot be split into .heads = ", heads, " equal heads; correct .heads");
  TESSERA_CHECK(heads % mesh.size() == 0, style.name(), ": ", mesh.size(), " ranks do not divide ",
                heads, " heads; choose a tensor-parallel size that divides the heads");
}

[[noreturn]] void fail_unfit(const ParallelStyle& style, const nn::ModuleBase& module,
                             const char* fits) {
  fail(style.name(), " is for ", fits, ", but the module is a ", module.name());
}

/// Adds a hook that redistributes the first argument of each call of `module` to Replicate.
/// `plain`: the placement of a plain argument.
void add_gathering_hook(nn::ModuleBase& module, const DeviceMesh& mesh, const Placement& plain,
                        bool regather) {
  module.add_forward_pre_hook([mesh, plain, regather](auto& self, nn::TensorList inputs) {
    *inputs[0] = prepare_input(self, *inputs[0], mesh, plain, Replicate{}, {}, regather);
  });
}

void require_tensor(const nn::ModuleBase& module, nn::TensorList tensors, const char* of) {
  TESSERA_CHECK(!tensors.empty(), module.name(), " has no tensor among its ", of,
                ", but the style converts the first tensor; remove the module from the plan");
}

// In the column-wise style each rank computes a shard of the output features from the whole input.
// The gradient of the input is a sum over the ranks.

class Colwise final : public ParallelStyle {
 public:
  explicit Colwise(ColwiseOptions options) : options_(options) {}

  std::string name() const override { return "colwise_parallel"; }
  /// With default options no hooks are needed: aten::linear redistributes its arguments itself.
  bool adds_hooks() const override {
    return !is_replicate(options_.input_layouts) || !is_shard(options_.output_layouts, -1) ||
           options_.use_local_output;
  }

  SlotPlacements parameters(const nn::ModuleBase& module) const override {
    if (is_embedding(module)) {
      // the weight of an embedding has the sizes (vocabulary, features)
      return {{module.slot("weight"), Shard{1}}};
    }
    if (!is_linear(module)) {
      fail_unfit(*this, module, "Linear and Embedding");
    }
    TESSERA_CHECK(dynamic_cast<const nn::FusedLinear*>(&module) == nullptr, name(),
                  " would not split each part of an nn::FusedLinear; use fused_colwise_parallel()");
    // the weight of a Linear has the sizes (out, in), and its bias (out)
    return placements_of(module, Shard{0}, Replicate{}, Shard{0});
  }

  void check(const nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    check_heads(*this, options_.heads, module.slot("weight")->get().size(is_linear(module) ? 0 : 1),
                mesh);
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    set_regathered_product(module, options_.regather);
    add_gathering_hook(module, mesh, options_.input_layouts, options_.regather);
    module.add_forward_hook([options = options_](auto&, nn::TensorList outputs) {
      // A plain output is not changed: the module has not returned its output features, but a
      // result computed from them, such as a loss.
      if (tessera::is_distributed(*outputs[0])) {
        *outputs[0] = prepare_output(*outputs[0], options.output_layouts, options.use_local_output);
      }
    });
  }

 private:
  ColwiseOptions options_;
};

/// This style shards each part of a fused weight separately. A contiguous shard of the weight's
/// rows would contain rows of only one or two parts.
class FusedColwise final : public ParallelStyle {
 public:
  explicit FusedColwise(FusedColwiseOptions options) : options_(options) {}

  std::string name() const override { return "fused_colwise_parallel"; }

  SlotPlacements parameters(const nn::ModuleBase& module) const override {
    const Placement rows = placement_of(module, 0);
    return placements_of(module, rows, Replicate{}, rows);
  }

  void check(const nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    const auto* fused = dynamic_cast<const nn::FusedLinear*>(&module);
    TESSERA_CHECK(fused == nullptr || fused->groups() == 1 || fused->groups() % mesh.size() == 0,
                  name(), ": ", mesh.size(), " ranks do not divide the ", fused->groups(),
                  " groups of the FusedLinear; choose a size that divides the groups");
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    set_regathered_product(module, options_.regather);
    add_gathering_hook(module, mesh, options_.input_layouts, options_.regather);
    module.add_forward_hook([style = *this](nn::ModuleBase& self, nn::TensorList outputs) {
      const Placement columns = style.placement_of(self, outputs[0]->dim() - 1);
      *outputs[0] = prepare_output(*outputs[0], columns, style.options_.use_local_output);
    });
  }

 private:
  /// Returns how to shard dimension `dim`, the output features. A FusedLinear with groups() > 1 is
  /// sharded by Shard, so that each rank gets whole groups; other fused layers by StridedShard.
  Placement placement_of(const nn::ModuleBase& module, std::int64_t dim) const {
    const std::int64_t parts = parts_of(module);
    return parts > 1 ? Placement(StridedShard{dim, parts}) : Shard{dim};
  }

  std::int64_t parts_of(const nn::ModuleBase& module) const {
    if (const auto* fused = dynamic_cast<const nn::FusedLinear*>(&module)) {
      return parts_of_fused(*fused);
    }
    const auto* linear = dynamic_cast<const nn::Linear*>(&module);
    if (linear == nullptr) {
      fail_unfit(*this, module, "nn::FusedLinear and nn::Linear");
    }
    TESSERA_CHECK(options_.parts > 0 && linear->out_features() % options_.parts == 0, name(),
                  ": an nn::Linear with ", linear->out_features(),
                  " output features cannot be split into .parts = ", options_.parts,
                  " equal parts; pass .parts = 3 for query, key and value of one size, .parts = 2 "
                  "for gate and up, or use an nn::FusedLinear");
    return options_.parts;
  }

  std::int64_t parts_of_fused(const nn::FusedLinear& fused) const {
    TESSERA_CHECK(options_.parts == 0, name(), ": .parts = ", options_.parts,
                  " was given for an nn::FusedLinear, which has its own parts; remove .parts");
    if (fused.groups() > 1) {
      return 1;
    }
    for (const nn::FusedPart& part : fused.parts()) {
      const nn::FusedPart& first = fused.parts().front();
      TESSERA_CHECK(part.out_features == first.out_features, name(), ": parts '", first.name,
                    "' and '", part.name, "' of a FusedLinear have ", first.out_features, " and ",
                    part.out_features,
                    " features; pass .groups = the number of key and value heads");
    }
    return static_cast<std::int64_t>(fused.parts().size());
  }

  FusedColwiseOptions options_;
};

/// Returns the rows of this rank's head as a tensor with Shard(0). `parameter` is replicated,
/// because there are fewer heads (`heads`) than ranks. The gradient of `parameter` is Partial.
at::Tensor copy_for_each_rank(const at::Tensor& parameter, const DeviceMesh& mesh,
                              std::int64_t heads) {
  const DistributedTensor replicated(parameter);
  const std::int64_t rows = parameter.size(0) / heads;
  const std::int64_t head = mesh.local_rank() / (mesh.size() / heads);
  const at::Tensor own = replicated.to_local(Placements{Partial{}}).narrow(0, head * rows, rows);
  std::vector<std::int64_t> sizes = parameter.sizes().vec();
  sizes.front() = mesh.size() * rows;
  return DistributedTensor::from_local(own, mesh, {Shard{0}}, std::move(sizes)).tensor();
}

/// The style for a Linear with fewer heads than ranks. Each rank computes one head; several ranks
/// compute the same head.
class ReplicatedHeads final : public ParallelStyle {
 public:
  explicit ReplicatedHeads(ReplicatedHeadsOptions options) : options_(options) {}

  std::string name() const override { return "replicated_heads_parallel"; }

  SlotPlacements parameters(const nn::ModuleBase& module) const override {
    const auto* linear = dynamic_cast<const nn::Linear*>(&module);
    if (linear == nullptr || dynamic_cast<const nn::FusedLinear*>(&module) != nullptr) {
      fail_unfit(*this, module, "nn::Linear");
    }
    TESSERA_CHECK(options_.heads > 0 && linear->out_features() % options_.heads == 0, name(),
                  ": an nn::Linear with ", linear->out_features(),
                  " output features cannot be split into .heads = ", options_.heads,
                  " equal heads; pass the number of key and value heads");
    return placements_of(module, Replicate{}, Replicate{}, Replicate{});
  }

  void check(const nn::ModuleBase&, const DeviceMesh& mesh) const override {
    TESSERA_CHECK(mesh.size() % options_.heads == 0, name(), ": ", mesh.size(),
                  " ranks are not a multiple of ", options_.heads,
                  " heads; choose a multiple of the heads as tensor-parallel size, or a divisor "
                  "with colwise_parallel()");
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    compute_one_head(dynamic_cast<nn::Linear&>(module), mesh);
    if (const auto lora = module.attached<nn::LoraBranch>()) {
      compute_one_head(*lora->b, mesh);
    }
    add_gathering_hook(module, mesh, options_.input_layouts, options_.regather);
    module.add_forward_hook([](auto&, nn::TensorList outputs) {
      *outputs[0] = prepare_output(*outputs[0], Shard{-1}, /*use_local_output=*/false);
    });
  }

 private:
  void compute_one_head(nn::Linear& linear, const DeviceMesh& mesh) const {
    linear.set_product([mesh, heads = options_.heads, product = regathered_product(linear)](
                           const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
      return product(x, copy_for_each_rank(weight, mesh, heads),
                     bias.defined() ? copy_for_each_rank(bias, mesh, heads) : at::Tensor());
    });
  }

  ReplicatedHeadsOptions options_;
};

// Row-wise: each rank has a shard of the input features or of the vocabulary, and computes a
// partial sum of the output. The redistribution to output_layouts adds the partial sums.

Placement placement_of_plain(const RowwiseOptions& options) {
  return options.input_layouts.value_or(Replicate{});
}

/// Returns the global sizes of a Linear's plain input if the input's last dimension is sharded;
/// otherwise nullopt. The last size comes from the module, because shards can be uneven.
std::optional<std::vector<std::int64_t>> input_sizes(const nn::ModuleBase& linear,
                                                     const at::Tensor& input,
                                                     const Placement& placement) {
  if (!is_shard(placement, -1) && !is_shard(placement, input.dim() - 1)) {
    return std::nullopt;
  }
  std::vector<std::int64_t> sizes = input.sizes().vec();
  sizes.back() = linear.slot("weight")->get().size(1);
  return sizes;
}

void check_features(const nn::ModuleBase& linear, const at::Tensor& input,
                    const RowwiseOptions& options) {
  const std::int64_t features = linear.slot("weight")->get().size(1);
  TESSERA_CHECK(tessera::is_distributed(input) || options.input_layouts || !input.defined() ||
                    input.dim() == 0 || input.size(-1) == features,
                "rowwise_parallel: the input of a Linear with ", features,
                " input features is a plain tensor of sizes ", input.sizes(),
                "; a plain tensor counts as replicated: set use_local_output = false in the style "
                "before, or input_layouts = Shard{-1} here if the tensor is this rank's part");
}

/// In Megatron-LM's notation x W, the row-wise style shards the rows of W. For an embedding, the
/// rows are the vocabulary.
class Rowwise final : public ParallelStyle {
 public:
  explicit Rowwise(RowwiseOptions options) : options_(options) {}

  std::string name() const override { return "rowwise_parallel"; }
  /// With default options the next operator reduces the Partial output, so no hooks are needed.
  bool adds_hooks() const override {
    return options_.input_layouts || !is_replicate(options_.output_layouts) ||
           options_.use_local_output;
  }

  SlotPlacements parameters(const nn::ModuleBase& module) const override {
    if (is_embedding(module)) {
      const Placement indices = placement_of_plain(options_);
      TESSERA_CHECK(is_replicate(indices), name(),
                    " of an Embedding was given input_layouts = ", to_string(indices),
                    ", but every rank needs all indices; remove input_layouts");
      return {{module.slot("weight"), Shard{0}}};
    }
    if (!is_linear(module)) {
      fail_unfit(*this, module, "Linear and Embedding");
    }
    // The bias is added to the sum over the ranks, so every rank needs the whole bias.
    SlotPlacements placements = placements_of(module, Replicate{}, Shard{1}, Replicate{});
    std::ranges::find(placements, module.slot("weight"), &SlotPlacements::value_type::first)
        ->second = Shard{1};
    return placements;
  }

  void check(const nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    TESSERA_CHECK(options_.heads == 0 || is_linear(module), name(), ": .heads = ", options_.heads,
                  " was given for a ", module.name(),
                  ", but only a Linear has heads; remove .heads");
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
    // The bias is not passed to at::linear, which would add the bias once on each rank.
    dynamic_cast<nn::detail::DeferredBias&>(linear).set_defer_bias(true);
    linear.add_forward_pre_hook([mesh, options = options_](auto& module, nn::TensorList inputs) {
      check_features(module, *inputs[0], options);
      const Placement plain = placement_of_plain(options);
      *inputs[0] = prepare_input(module, *inputs[0], mesh, plain, Shard{-1},
                                 input_sizes(module, *inputs[0], plain));
    });
    const bool has_bias = linear.slots().size() > 1;
    linear.add_forward_hook([options = options_, has_bias](auto& module, nn::TensorList outputs) {
      at::Tensor output = prepare_output(*outputs[0], options.output_layouts, false);
      if (has_bias) {
        output = output.add(module.slot("bias")->get());
      }
      *outputs[0] = prepare_output(output, options.output_layouts, options.use_local_output);
    });
  }

  /// Each rank looks up all indices in its rows of the table; indices of other rows give zeros.
  void apply_to_embedding(nn::ModuleBase& embedding, const DeviceMesh& mesh) const {
    add_gathering_hook(embedding, mesh, placement_of_plain(options_), /*regather=*/false);
    embedding.add_forward_hook([options = options_](auto&, nn::TensorList outputs) {
      *outputs[0] = prepare_output(*outputs[0], options.output_layouts, options.use_local_output);
    });
  }

  RowwiseOptions options_;
};

/// The style for modules that have replicated parameters and process each token separately. If the
/// sequence is sharded (Korthikanti et al. 2022), the gradients of the parameters are Partial.
class ReplicatedParameters final : public ParallelStyle {
 public:
  ReplicatedParameters(std::string name, Placement activations, bool use_local_output)
      : name_(std::move(name)), activations_(activations), use_local_output_(use_local_output) {}

  std::string name() const override { return name_; }

  SlotPlacements parameters(const nn::ModuleBase& module) const override {
    SlotPlacements placements;
    // A plan entry can name a container of norms, so parameters of submodules are included.
    for (const auto& [name, slot] : module.named_slots()) {
      placements.emplace_back(slot, Replicate{});
    }
    return placements;
  }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    module.add_forward_pre_hook([mesh, layout = activations_](auto& self, nn::TensorList inputs) {
      require_tensor(self, inputs, "arguments");
      *inputs[0] = prepare_input(self, *inputs[0], mesh, Replicate{}, layout);
    });
    module.add_forward_hook(
        [layout = activations_, local = use_local_output_](auto& self, nn::TensorList outputs) {
          require_tensor(self, outputs, "results");
          *outputs[0] = prepare_output(*outputs[0], layout, local);
        });
  }

 private:
  std::string name_;
  Placement activations_;
  bool use_local_output_;
};

/// This style adds no hooks, so it has an effect even if the program never calls the module itself.
class PlaceParameters final : public ParallelStyle {
 public:
  explicit PlaceParameters(std::vector<std::pair<std::string, Placement>> placements)
      : placements_(std::move(placements)) {}

  std::string name() const override { return "place_parameters"; }
  bool adds_hooks() const override { return false; }

  SlotPlacements parameters(const nn::ModuleBase& module) const override {
    TESSERA_CHECK(!module.slots().empty(), name(), ": a ", module.name(),
                  " has no parameters of its own; name the child modules that have parameters");
    for (const auto& [parameter, placement] : placements_) {
      module.slot(parameter);  // slot() throws if no parameter has this name
    }
    SlotPlacements placements;
    for (const auto& [parameter, slot] : module.slots()) {
      placements.emplace_back(slot, placement_of(parameter));
    }
    return placements;
  }

  void apply(nn::ModuleBase&, const DeviceMesh&) const override {}

 private:
  Placement placement_of(const std::string& parameter) const {
    const auto found =
        std::ranges::find(placements_, parameter, &std::pair<std::string, Placement>::first);
    return found == placements_.end() ? Placement(Replicate{}) : found->second;
  }

  std::vector<std::pair<std::string, Placement>> placements_;
};

using OptionalPlacements = std::vector<std::optional<Placement>>;

void check_lists(const std::string& style, const OptionalPlacements& layouts,
                 const OptionalPlacements& desired) {
  TESSERA_CHECK(layouts.size() == desired.size(), style, " was given ", layouts.size(),
                " placements and ", desired.size(),
                " desired placements; pass equal numbers (nullopt leaves a tensor unchanged)");
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    TESSERA_CHECK(layouts[i].has_value() == desired[i].has_value(), style, ": tensor ", i,
                  " has only a placement or only a desired placement; pass both or neither");
  }
}

enum class Side { kInputs, kOutputs };

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

  SlotPlacements parameters(const nn::ModuleBase&) const override { return {}; }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    // The hook has a copy of the style, because the module can exist longer than the plan.
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
  /// Converts the first layouts_.size() tensors of the call's arguments or results.
  void convert(const nn::ModuleBase& module, nn::TensorList tensors, const DeviceMesh& mesh) const {
    TESSERA_CHECK(tensors.size() >= layouts_.size(), name(), " has placements for ",
                  layouts_.size(), " tensors, but the call has ", tensors.size(),
                  " tensors; correct the plan");
    for (std::size_t i = 0; i < layouts_.size(); ++i) {
      if (!layouts_[i]) {
        continue;
      }
      const at::Tensor desired =
          prepare_input(module, *tensors[i], mesh, *layouts_[i], *desired_[i], {}, regather_);
      *tensors[i] = prepare_output(desired, *desired_[i], use_local_);
    }
  }

  Side side_;
  OptionalPlacements layouts_, desired_;
  bool use_local_;
  bool regather_;
};

class PrepareBoth final : public ParallelStyle {
 public:
  PrepareBoth(StylePtr inputs, StylePtr outputs)
      : inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

  std::string name() const override { return "prepare_module_input_output"; }

  SlotPlacements parameters(const nn::ModuleBase&) const override { return {}; }

  void apply(nn::ModuleBase& module, const DeviceMesh& mesh) const override {
    inputs_->apply(module, mesh);
    outputs_->apply(module, mesh);
  }

 private:
  StylePtr inputs_, outputs_;
};

}  // namespace

at::Tensor prepare_input(const nn::ModuleBase& module, const at::Tensor& tensor,
                         const DeviceMesh& mesh, const Placement& layout, const Placement& desired,
                         std::optional<std::vector<std::int64_t>> sizes, bool regather) {
  TESSERA_CHECK(tensor.defined(), "a tensor-parallel style of a ", module.name(),
                " was given an undefined tensor; remove the tensor from the plan");
  if (!tessera::is_distributed(tensor)) {
    return redistribute_to(from_plain(module, tensor, mesh, layout, std::move(sizes)), desired,
                           regather);
  }
  const DistributedTensor distributed(tensor);
  TESSERA_CHECK(distributed.mesh() == mesh, "a tensor-parallel style of a ", module.name(), " on ",
                to_string(mesh), " was given a tensor on ", to_string(distributed.mesh()),
                "; pass a tensor on the mesh of the style, or to_local() of the tensor");
  return redistribute_to(distributed, desired, regather);
}

StylePtr colwise_parallel(ColwiseOptions options) {
  return std::make_shared<Colwise>(options);
}

StylePtr fused_colwise_parallel(FusedColwiseOptions options) {
  return std::make_shared<FusedColwise>(options);
}

StylePtr replicated_heads_parallel(ReplicatedHeadsOptions options) {
  return std::make_shared<ReplicatedHeads>(options);
}

StylePtr rowwise_parallel(RowwiseOptions options) {
  return std::make_shared<Rowwise>(options);
}

StylePtr sequence_parallel(SequenceOptions options) {
  return std::make_shared<ReplicatedParameters>("sequence_parallel", Shard{options.sequence_dim},
                                                options.use_local_output);
}

StylePtr replicate_parallel(ReplicateOptions options) {
  return std::make_shared<ReplicatedParameters>("replicate_parallel", Replicate{},
                                                options.use_local_output);
}

StylePtr place_parameters(std::vector<std::pair<std::string, Placement>> placements) {
  return std::make_shared<PlaceParameters>(std::move(placements));
}

StylePtr prepare_module_input(PrepareModuleInputOptions options) {
  return std::make_shared<Prepare>(Side::kInputs, std::move(options.input_layouts),
                                   std::move(options.desired_input_layouts),
                                   options.use_local_output, options.regather);
}

StylePtr prepare_module_output(PrepareModuleOutputOptions options) {
  return std::make_shared<Prepare>(Side::kOutputs, std::move(options.output_layouts),
                                   std::move(options.desired_output_layouts),
                                   options.use_local_output);
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

}  // namespace tessera::tensor_parallel
