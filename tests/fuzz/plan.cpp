// Translates the options of a case to options and plans of the library.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/case.h"
#include "fuzz/run.h"
#include "tessera/nn/module.h"

namespace tessera::fuzz {
namespace {

/// Shards the stacked weights of experts. It has no hooks: operators propagate the shards.
class ExpertsParallel final : public tensor_parallel::ParallelStyle {
 public:
  explicit ExpertsParallel(bool whole_experts) : whole_experts_(whole_experts) {}

  std::string name() const override { return "experts_parallel"; }
  std::vector<std::pair<nn::SlotPtr, Placement>> parameters(
      const nn::ModuleBase& module) const override {
    // Weights are (experts, in, out). The inner features are split.
    return {{module.slot("up"), Shard{whole_experts_ ? 0 : 2}},
            {module.slot("down"), Shard{whole_experts_ ? 0 : 1}}};
  }
  void apply(nn::ModuleBase&, const DeviceMesh&) const override {}

 private:
  bool whole_experts_;
};

}  // namespace

tensor_parallel::StylePtr make_style(const StyleSpec& s) {
  using namespace tensor_parallel;
  switch (s.kind) {
    case StyleKind::kColwise:
      return colwise_parallel({.output_layouts = s.output, .use_local_output = s.local});
    case StyleKind::kRowwise:
      return rowwise_parallel(
          {.input_layouts = s.takes_part ? std::optional<Placement>(Shard{-1}) : std::nullopt,
           .output_layouts = s.output,
           .use_local_output = s.local});
    case StyleKind::kSequence:
      return sequence_parallel({.sequence_dim = s.dim, .use_local_output = s.local});
    case StyleKind::kReplicate:
      return replicate_parallel({.use_local_output = s.local});
    case StyleKind::kPrepareInput:
      return prepare_module_input({.input_layouts = {Replicate{}},
                                   .desired_input_layouts = {s.output},
                                   .use_local_output = s.local});
    case StyleKind::kPrepareOutput:
      return prepare_module_output({.output_layouts = {Replicate{}},
                                    .desired_output_layouts = {s.output},
                                    .use_local_output = s.local});
    case StyleKind::kFusedColwise:
      return fused_colwise_parallel({.parts = s.parts, .use_local_output = s.local});
    case StyleKind::kExperts:
      return std::make_shared<ExpertsParallel>(s.dim == 0);
  }
  return nullptr;
}

DeviceMesh make_mesh(const MeshSpec& spec, const testing::Rank& rank) {
  std::vector<std::int64_t> sizes{spec.data};
  std::vector<std::string> names{"dp"};
  if (spec.replicas > 1) {
    sizes.insert(sizes.begin(), spec.replicas);
    names.insert(names.begin(), "replicas");
  }
  sizes.insert(spec.tensor_first ? sizes.begin() : sizes.end(), spec.tensor);
  names.insert(spec.tensor_first ? names.begin() : names.end(), "tp");
  return rank.mesh(sizes, names);
}

DeviceMesh data_mesh(const MeshSpec& spec, const DeviceMesh& mesh) {
  return spec.replicas > 1 ? mesh[{"replicas", "dp"}] : mesh["dp"];
}

fsdp::Options fsdp_options(const FsdpSpec& spec) {
  fsdp::Options options;
  if (spec.reshard != Reshard::kDefault) {
    options.reshard_after_forward = spec.reshard == Reshard::kAlways;
  }
  if (spec.offload) {
    options.offload_policy = fsdp::OffloadPolicy{};
  }
  options.post_forward_mesh_size = spec.post_forward;
  options.may_be_unused = spec.may_be_unused;
  if (spec.placement == ShardPlacement::kLast) {
    options.shard_placement = [](const std::string&, const at::Tensor& parameter) {
      return std::optional<Placement>(Shard{parameter.dim() - 1});
    };
  } else if (spec.placement == ShardPlacement::kReplicateVectors) {
    options.shard_placement = [](const std::string&, const at::Tensor& parameter) {
      return parameter.dim() == 1 ? std::optional<Placement>(Replicate{}) : std::nullopt;
    };
  }
  return options;
}

// Plans as people write them. The right plan is Megatron's: column-wise into each half of a block,
// row-wise out of it; between the halves activations are replicated or split along the sequence.
// Mistakes are then made entry by entry with some probability. No mistake may change a result,
// since missing entries are derived from the layouts.
namespace {

enum class Between { kWhole, kReplicated, kSequence };

/// The styles that a module can have.
enum class Fits { kLinear, kTokenwise, kHooksOnly };

/// A module that a plan can name, and its right style; none if the plan may omit the module.
struct Candidate {
  std::string pattern;
  std::optional<StyleSpec> style;
  Fits fits = Fits::kLinear;
  /// The user has declared a local input or output, so that no mistake is drawn.
  bool agreed = false;
};

StyleSpec colwise(Placement output, bool local = false) {
  return {.kind = StyleKind::kColwise, .output = output, .local = local};
}

StyleSpec rowwise(Placement output, bool local = false) {
  return {.kind = StyleKind::kRowwise, .output = output, .local = local};
}

/// Whether each rank's local tensor is the whole result, so that a local output is right.
bool is_whole(const StyleSpec& style) {
  return style.kind != StyleKind::kSequence && style.kind != StyleKind::kFusedColwise &&
         style.kind != StyleKind::kExperts && std::holds_alternative<Replicate>(style.output);
}

class PlanDraft {
 public:
  PlanDraft(const Case& c, Choices& choices)
      : model_(c.model), train_(c.train), ranks_(c.mesh.tensor), choices_(choices) {
    // The options are named by PyTorch's defaults, which return whole results as plain tensors.
    between_ =
        choices.pick_as<Between>("plan", {{"plain", 40}, {"distributed", 25}, {"sequence", 35}});
    local_ = between_ == Between::kWhole && choices.chance("plan.local", 40);
    sequence_dim_ = model_.folded ? 0 : 1;
    if (between_ == Between::kSequence) {
      stream_ = Shard{sequence_dim_};
    }
  }

  std::vector<Candidate> candidates() {
    add_embedding();
    if (model_.attention) {
      add_attention();
    }
    if (model_.mlp) {
      add_mlp();
    }
    add_head();
    return std::move(candidates_);
  }

 private:
  /// A Linear or an Embedding.
  void add(std::string pattern, std::optional<StyleSpec> style = {}, bool agreed = false) {
    candidates_.push_back({std::move(pattern), style, Fits::kLinear, agreed});
  }

  void add_other(std::string pattern, Fits fits, std::optional<StyleSpec> style = {}) {
    candidates_.push_back({std::move(pattern), style, fits});
  }

  /// Adds an entry for a module that works on each token separately. With whole activations it
  /// needs no entry.
  void add_tokenwise(const std::string& pattern) {
    if (between_ == Between::kWhole) {
      add_other(pattern, Fits::kTokenwise);
    } else if (between_ == Between::kReplicated) {
      add_other(pattern, Fits::kTokenwise, StyleSpec{.kind = StyleKind::kReplicate});
    } else {
      add_other(pattern, Fits::kTokenwise,
                StyleSpec{.kind = StyleKind::kSequence, .dim = sequence_dim_});
    }
  }

  void add_norm(const std::string& pattern, NormKind kind) {
    if (kind != NormKind::kNone) {
      add_tokenwise(pattern);
    }
  }

  void add_embedding() {
    const auto kind =
        choices_.pick("plan.embedding", {{"rowwise", 50}, {"colwise", 30}, {"none", 20}});
    if (kind == 2 && between_ == Between::kWhole) {
      add("embed");
    } else if (kind == 0 || model_.tied) {
      add("embed", rowwise(stream_, local_));
    } else {
      add("embed", colwise(stream_, local_));
    }
    if (model_.position) {
      add_tokenwise("position");
    }
    if (model_.dropout != DropoutKind::kNone) {
      add_tokenwise("dropout");
    }
  }

  void add_gather(const std::string& pattern) {
    if (between_ != Between::kWhole) {
      add_other(pattern, Fits::kHooksOnly, StyleSpec{.kind = StyleKind::kPrepareInput});
    }
  }

  /// Adds a projection into a half, with or without an adapter, whose parameters need no entries.
  void add_into(const std::string& pattern, bool local, bool adapter) {
    add(pattern + (adapter ? ".base" : ""), colwise(Shard{-1}, local), local);
    if (adapter) {
      add(pattern + ".a");
      add(pattern + ".b", choices_.chance("plan.adapter", 50)
                              ? std::optional<StyleSpec>(colwise(Shard{-1}))
                              : std::nullopt);
    }
  }

  /// Adds a weight of `parts` equal parts. If a shard ends inside a part, the operators that split
  /// the weight gather it.
  void add_fused(const std::string& pattern, std::int64_t parts, bool local) {
    const bool cut = parts > 0 && choices_.chance("plan.fused_colwise", 50);
    add(pattern,
        cut || local ? StyleSpec{.kind = StyleKind::kFusedColwise, .local = local, .parts = parts}
                     : colwise(Shard{-1}),
        local);
  }

  void add_out_of(const std::string& pattern, bool local, bool adapter) {
    StyleSpec out = rowwise(stream_, local_);
    out.takes_part = local;
    add(pattern + (adapter ? ".base" : ""), out, local);
    if (adapter) {
      add(pattern + ".a", choices_.chance("plan.adapter", 50)
                              ? std::optional<StyleSpec>(rowwise(Replicate{}))
                              : std::nullopt);
      add(pattern + ".b");
    }
  }

  /// Whether the code between the projections also works on this rank's heads alone, as plain
  /// tensors.
  bool runs_on_heads() const {
    const AttentionSpec& spec = model_.attend;
    const std::int64_t kv = spec.key_value_heads;
    return model_.heads % ranks_ == 0 && kv % ranks_ == 0 && (!spec.fused || kv == model_.heads) &&
           spec.query_key_norm == NormKind::kNone && spec.mask != Mask::kSlopes &&
           !spec.temperature && !spec.gain && !spec.adapter && !spec.dropout;
  }

  void add_attention() {
    const AttentionSpec& spec = model_.attend;
    const std::string name = "blocks.*.attention";
    add_norm("blocks.*.norm1", model_.norm);
    add_gather(name);
    const bool local = runs_on_heads() && choices_.chance("plan.attention_local", 35);
    if (spec.fused) {
      add_fused(name + ".qkv_proj", spec.key_value_heads == model_.heads ? 3 : 0, local);
    } else {
      add_into(name + ".q_proj", local, spec.adapter);
      add_into(name + ".k_proj", local, false);
      add_into(name + ".v_proj", local, false);
    }
    if (spec.query_key_norm != NormKind::kNone) {
      add_query_key_norm(name + ".q_norm");
      add_query_key_norm(name + ".k_norm");
    }
    add_out_of(name + ".o_proj", local, false);
    if (model_.dropout != DropoutKind::kNone) {
      add_tokenwise("blocks.*.dropout1");
    }
  }

  /// The norm is called with heads in dimension 2.
  void add_query_key_norm(const std::string& pattern) {
    const auto kind =
        choices_.pick("plan.query_key_norm", {{"heads", 50}, {"none", 25}, {"replicate", 25}});
    const std::vector<std::optional<StyleSpec>> styles{
        StyleSpec{.kind = StyleKind::kSequence, .dim = 2}, std::nullopt,
        StyleSpec{.kind = StyleKind::kReplicate}};
    add_other(pattern, Fits::kTokenwise, styles[kind]);
  }

  /// The same as runs_on_heads() for the features between the MLP's projections.
  bool runs_on_features() const {
    const MlpSpec& spec = model_.feed;
    return spec.activation != Activation::kCentred &&
           spec.activation != Activation::kRandomMultiply && spec.along == Along::kNone &&
           spec.middle_norm == NormKind::kNone && spec.dropout == DropoutKind::kNone &&
           !spec.adapter && !spec.auxiliary_loss && !spec.inner_bias;
  }

  void add_mlp() {
    const MlpSpec& spec = model_.feed;
    const std::string name = "blocks.*.mlp";
    add_norm("blocks.*.norm2", model_.norm);
    add_gather(name);
    if (spec.kind == MlpKind::kExperts) {
      add_experts(name + ".experts");
    } else {
      add_projections(name);
    }
    if (model_.dropout != DropoutKind::kNone) {
      add_tokenwise("blocks.*.dropout2");
    }
  }

  void add_experts(const std::string& name) {
    const auto kind = choices_.pick("plan.experts", {{"none", 30}, {"inner", 40}, {"whole", 30}});
    if (kind != 0) {
      add_other(name, Fits::kHooksOnly,
                StyleSpec{.kind = StyleKind::kExperts, .dim = kind == 2 ? 0 : 1});
    }
    add(name + ".router");
  }

  void add_projections(const std::string& name) {
    const MlpSpec& spec = model_.feed;
    // fused_colwise_parallel() does not know the parts of libtorch's own Linear.
    const bool knows_parts = spec.linear == LinearKind::kOwn;
    const bool local = runs_on_features() && (knows_parts || spec.kind != MlpKind::kFusedWeight) &&
                       choices_.chance("plan.mlp_local", 35);
    if (spec.kind == MlpKind::kFusedWeight) {
      add_fused(name + ".gate_up_proj", knows_parts ? 2 : 0, local);
    } else {
      add_into(name + ".up_proj", local, false);
    }
    if (spec.kind == MlpKind::kGated || spec.kind == MlpKind::kGatedFusedKernel) {
      add_into(name + ".gate_proj", local, false);
    }
    if (spec.middle_norm != NormKind::kNone) {
      add_other(name + ".middle_norm", Fits::kTokenwise);
    }
    if (spec.dropout != DropoutKind::kNone) {
      add_other(name + ".dropout", Fits::kTokenwise);
    }
    add_out_of(name + ".down_proj", local, spec.adapter);
  }

  void add_head() {
    add_norm("norm", model_.final_norm);
    if (model_.part_scale != PartScale::kNone) {
      add_tokenwise("scale");
    }
    if (train_.loss != Loss::kLossParallel && between_ == Between::kWhole &&
        choices_.chance("plan.head_left_out", 30)) {
      add("head");
    } else if (train_.loss == Loss::kLossParallel || choices_.chance("plan.head_split", 50)) {
      add("head", colwise(Shard{-1}));
    } else {
      add("head", colwise(Replicate{}, choices_.chance("plan.head_local", 50)));
    }
  }

  const ModelSpec& model_;
  const TrainSpec& train_;
  std::int64_t ranks_;
  Choices& choices_;
  Between between_ = Between::kWhole;
  bool local_ = false;  ///< halves return whole results as plain tensors
  std::int64_t sequence_dim_ = 1;
  Placement stream_ = Replicate{};
  std::vector<Candidate> candidates_;
};

Placement draw_placement(Choices& choices, const std::string& name) {
  const auto kind = choices.pick(name, {{"R", 3}, {"S-1", 3}, {"S0", 1}, {"S1", 1}});
  const std::int64_t dims[] = {0, -1, 0, 1};
  return kind == 0 ? Placement(Replicate{}) : Shard{dims[kind]};
}

StyleSpec draw_style(Choices& choices, const std::string& name, Fits fits) {
  const int linear = fits == Fits::kLinear ? 4 : 0, places = fits != Fits::kHooksOnly ? 3 : 0;
  StyleSpec spec;
  spec.kind = choices.pick_as<StyleKind>(name + ".kind", {{"colwise", linear},
                                                          {"rowwise", linear},
                                                          {"sequence", places},
                                                          {"replicate", places},
                                                          {"prepare_input", 1},
                                                          {"prepare_output", 1}});
  spec.output = draw_placement(choices, name + ".output");
  spec.dim = choices.number(name + ".dim", {1, 0, 2});
  spec.local = is_whole(spec) && choices.chance(name + ".local", 50);
  return spec;
}

/// The style of an entry after a possible mistake.
std::optional<StyleSpec> with_mistake(const Candidate& candidate, const std::string& name,
                                      Choices& choices) {
  enum class Mistake { kNone, kForgotten, kOtherStyle, kOtherLocal, kOtherOutput };
  const auto mistake = choices.pick_as<Mistake>(name, {{"right", 76},
                                                       {"forgotten", 7},
                                                       {"other_style", 5},
                                                       {"other_local", 5},
                                                       {"other_output", 7}});
  if (mistake == Mistake::kForgotten) {
    return std::nullopt;
  }
  if (mistake == Mistake::kOtherStyle) {
    return draw_style(choices, name, candidate.fits);
  }
  std::optional<StyleSpec> style = candidate.style;
  if (style && mistake == Mistake::kOtherOutput) {
    style->output = draw_placement(choices, name + ".output");
    style->local = style->local && is_whole(*style);
  } else if (style && mistake == Mistake::kOtherLocal) {
    style->local = !style->local && is_whole(*style);
  }
  return style;
}

std::vector<std::string> patterns_of(const std::string& pattern, std::int64_t depth, bool apart) {
  const std::string wildcard = "blocks.*";
  if (!apart || !pattern.starts_with(wildcard)) {
    return {pattern};
  }
  std::vector<std::string> patterns;
  for (std::int64_t i = 0; i < depth; ++i) {
    patterns.push_back("blocks." + std::to_string(i) + pattern.substr(wildcard.size()));
  }
  return patterns;
}

}  // namespace

std::vector<PlanEntry> draw_plan(const Case& c, Choices& choices) {
  if (choices.chance("plan.none", 4)) {
    return {};
  }
  const bool mistakes = choices.chance("plan.mistakes", 40);
  const bool apart = choices.chance("plan.block_by_block", 20);
  std::vector<PlanEntry> plan;
  for (const Candidate& candidate : PlanDraft(c, choices).candidates()) {
    for (const std::string& pattern : patterns_of(candidate.pattern, c.model.depth, apart)) {
      const std::optional<StyleSpec> style =
          mistakes && !candidate.agreed ? with_mistake(candidate, "plan." + pattern, choices)
                                        : candidate.style;
      if (style) {
        plan.push_back({pattern, *style});
      }
    }
  }
  return plan;
}

}  // namespace tessera::fuzz
