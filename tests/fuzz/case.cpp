#include "fuzz/case.h"

#include <optional>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::fuzz {
namespace {

/// Hashes a seed and the name of a decision (FNV-1a, then the mixing function of splitmix64).
std::uint64_t hash_of(std::uint64_t seed, const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325 ^ (seed * 0x9e3779b97f4a7c15);
  for (const unsigned char c : name) {
    hash = (hash ^ c) * 0x100000001b3;
  }
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
  return hash ^ (hash >> 31);
}

std::size_t drawn(std::uint64_t hash, const std::vector<Choices::Option>& options) {
  int total = 0;
  for (const Choices::Option& option : options) {
    total += option.weight;
  }
  int rest = static_cast<int>(hash % static_cast<std::uint64_t>(total));
  std::size_t index = 0;
  while (rest >= options[index].weight) {
    rest -= options[index++].weight;
  }
  return index;
}

std::size_t index_of(const std::string& name, const std::string& label,
                     const std::vector<Choices::Option>& options) {
  for (std::size_t i = 0; i < options.size(); ++i) {
    if (options[i].label == label) {
      return i;
    }
  }
  fail("'", name, "' was set to '", label, "', which is none of its options");
}

}  // namespace

Choices::Choices(std::uint64_t seed, Labels fixed) : seed_(seed), fixed_(std::move(fixed)) {}

std::size_t Choices::pick(const std::string& name, const std::vector<Option>& options) {
  const auto fixed = fixed_.find(name);
  std::size_t index = 0;
  if (fixed == fixed_.end()) {
    index = fixed_.contains(kOthers) ? 0 : drawn(hash_of(seed_, name), options);
  } else if (!fixed->second.empty()) {
    index = index_of(name, fixed->second, options);
  }
  if (index > 0) {
    made_[name] = options[index].label;
  }
  return index;
}

std::int64_t Choices::number(const std::string& name, const std::vector<std::int64_t>& values) {
  std::vector<Option> options;
  for (const std::int64_t value : values) {
    options.push_back({std::to_string(value)});
  }
  return values[pick(name, options)];
}

bool Choices::chance(const std::string& name, int percent) {
  return pick(name, {{"no", 100 - percent}, {"yes", percent}}) == 1;
}

std::string to_string(const Choices::Labels& labels, const char* separator) {
  std::string text;
  for (const auto& [name, label] : labels) {
    text += (text.empty() ? "" : separator) + name + "=" + label;
  }
  return text;
}

// Draws the parts of a case. Sizes are small and often not divisible by the mesh sizes. Options
// that the library can refuse are rare: a refused case tests little.
namespace {

NormKind draw_norm(Choices& choices, const std::string& name, int none) {
  return choices.pick_as<NormKind>(name, {{"none", none},
                                          {"rms", 30},
                                          {"layer", 15},
                                          {"layer_without_bias", 5},
                                          {"scale", 5},
                                          {"stock_layer", 2}});
}

DropoutKind draw_dropout(Choices& choices, const std::string& name) {
  return choices.pick_as<DropoutKind>(name,
                                      {{"none", 88}, {"module", 8}, {"function", 2}, {"stock", 2}});
}

AttentionSpec draw_attention(Choices& choices, std::int64_t heads) {
  AttentionSpec spec;
  spec.key_value_heads = choices.chance("attention.grouped", 25) ? heads / 2 : heads;
  spec.fused = choices.chance("attention.fused", 12);
  spec.bias = choices.chance("attention.bias", 30);
  spec.causal = choices.chance("attention.causal", 50);
  spec.by_hand = choices.chance("attention.by_hand", 30);
  spec.adapter = choices.chance("attention.adapter", 12);
  spec.query_key_norm = draw_norm(choices, "attention.query_key_norm", 300);
  spec.dropout = choices.chance("attention.dropout", 3);
  spec.gain = choices.chance("attention.gain", 6);
  spec.rotary =
      choices.pick_as<Rotary>("attention.rotary", {{"none", 80}, {"function", 12}, {"by_hand", 8}});
  spec.mask = choices.pick_as<Mask>("attention.mask", {{"none", 85}, {"window", 8}, {"slopes", 7}});
  return spec;
}

MlpSpec draw_mlp(Choices& choices) {
  MlpSpec spec;
  spec.kind = choices.pick_as<MlpKind>(
      "mlp.kind",
      {{"plain", 40}, {"gated", 25}, {"fused_kernel", 20}, {"fused_weight", 8}, {"experts", 25}});
  spec.experts = {.experts = choices.number("experts", {4, 3, 6}),
                  .top_k = choices.number("experts.top_k", {2, 1, 3}),
                  .sigmoid = choices.chance("experts.sigmoid", 30),
                  .not_normalized = choices.chance("experts.not_normalized", 30),
                  .selection_bias = choices.chance("experts.selection_bias", 20),
                  .shared = choices.chance("experts.shared", 30)};
  spec.inner = choices.number("mlp.inner", {12, 8, 10, 24});
  spec.bias = choices.chance("mlp.bias", 40);
  spec.linear = choices.chance("mlp.stock_linear", 4) ? LinearKind::kStock : LinearKind::kOwn;
  spec.activation = choices.pick_as<Activation>(
      "mlp.activation", {{"gelu", 40}, {"relu", 20}, {"centred", 2}, {"random_multiply", 1}});
  spec.along = choices.pick_as<Along>(
      "mlp.along", {{"none", 86}, {"softmax", 2}, {"cumsum", 2}, {"exchanged_halves", 2}});
  spec.inner_bias = choices.chance("mlp.inner_bias", 6);
  spec.auxiliary_loss =
      choices.chance("mlp.auxiliary_loss", spec.kind == MlpKind::kExperts ? 60 : 8);
  spec.middle_norm = draw_norm(choices, "mlp.middle_norm", 700);
  spec.dropout = draw_dropout(choices, "mlp.dropout");
  spec.adapter = choices.chance("mlp.adapter", 12);
  spec.calls_forward = choices.chance("mlp.calls_forward", 2);
  spec.checkpoint_call = choices.chance("mlp.checkpoint_call", 8);
  // No rank may skip the experts, because ranks with different experts exchange tokens.
  spec.skips_empty = spec.kind != MlpKind::kExperts && choices.chance("mlp.skips_empty", 8);
  return spec;
}

ModelSpec draw_model(Choices& choices) {
  ModelSpec spec;
  spec.vocabulary = choices.number("vocabulary", {12, 11, 16});
  spec.heads = choices.number("heads", {4, 2, 6});
  spec.head_dim = choices.number("head_dim", {2, 4});
  spec.depth = choices.number("depth", {1, 2});
  spec.folded = choices.chance("folded", 30);
  spec.position = !spec.folded && choices.chance("position", 20);
  spec.repeated = choices.chance("repeated", 6);
  spec.tied = choices.chance("tied", 20);
  spec.norm = draw_norm(choices, "norm", 10);
  spec.final_norm = draw_norm(choices, "final_norm", 20);
  spec.dropout = draw_dropout(choices, "dropout");
  spec.residual_scale = choices.pick_as<ResidualScale>(
      "residual_scale", {{"none", 91}, {"vector", 5}, {"scalar", 4}});
  spec.padding_mask = choices.chance("padding_mask", 8);
  spec.attention = !choices.chance("without_attention", 20);
  spec.mlp = !spec.attention || !choices.chance("without_mlp", 20);
  spec.attend = draw_attention(choices, spec.heads);
  spec.feed = draw_mlp(choices);
  return spec;
}

MeshSpec draw_mesh(Choices& choices) {
  struct Shape {
    std::int64_t replicas, data, tensor;
    int weight;
  };
  const std::vector<Shape> shapes{{1, 1, 1, 1}, {1, 1, 2, 16}, {1, 2, 1, 12}, {1, 2, 2, 20},
                                  {1, 1, 3, 6}, {1, 3, 1, 5},  {1, 1, 4, 6},  {1, 4, 1, 5},
                                  {2, 2, 1, 8}, {2, 1, 2, 3},  {2, 2, 2, 3},  {1, 2, 3, 2},
                                  {1, 3, 2, 2}, {1, 2, 4, 1},  {1, 4, 2, 1}};
  std::vector<Choices::Option> options;
  for (const Shape& s : shapes) {
    options.push_back(
        {std::to_string(s.replicas) + "x" + std::to_string(s.data) + "x" + std::to_string(s.tensor),
         s.weight});
  }
  const Shape shape = shapes[choices.pick("mesh", options)];
  const auto experts = choices.pick(
      "mesh.experts", {{"whole", 25}, {"half", shape.data == 4 ? 40 : 0}, {"all", 60}});
  const std::int64_t ranks[] = {1, 2, shape.data};
  return {.replicas = shape.replicas,
          .data = shape.data,
          .tensor = shape.tensor,
          .tensor_first = choices.chance("mesh.tensor_first", 10),
          .experts = ranks[experts]};
}

FsdpSpec draw_fsdp(Choices& choices, const MeshSpec& mesh) {
  FsdpSpec spec;
  const bool split = mesh.replicas * mesh.data > 1;
  spec.kind = choices.pick_as<DataParallel>(
      "fsdp",
      {{"fully_shard", 80}, {"replicate", mesh.replicas == 1 ? 15 : 0}, {"none", split ? 0 : 80}});
  if (spec.kind == DataParallel::kNone) {
    return spec;
  }
  spec.units = choices.pick_as<Units>("fsdp.units", {{"root", 25}, {"blocks", 55}, {"halves", 15}});
  spec.reshard =
      choices.pick_as<Reshard>("fsdp.reshard", {{"default", 60}, {"always", 20}, {"never", 20}});
  spec.offload = choices.chance("fsdp.offload", 8);
  spec.before_tensor_parallel = choices.chance("fsdp.before_tensor_parallel", 2);
  spec.prefetch = choices.chance("fsdp.prefetch", 10);
  if (spec.kind == DataParallel::kFullyShard) {
    spec.placement = choices.pick_as<ShardPlacement>(
        "fsdp.placement", {{"default", 85}, {"last", 8}, {"replicate_vectors", 7}});
    const bool halves = mesh.data / mesh.experts % 2 == 0;
    spec.post_forward = choices.pick("fsdp.post_forward", {{"1", 90}, {"2", halves ? 8 : 0}}) + 1;
  }
  return spec;
}

TrainSpec draw_train(Choices& choices, const FsdpSpec& fsdp) {
  TrainSpec spec;
  spec.batch = choices.number("batch", {4, 8, 12, 5, 7, 3});
  spec.sequence = choices.number("sequence", {4, 6, 5});
  spec.micro_batches = choices.pick("micro_batches", {{"1", 60}, {"2", 25}, {"3", 15}}) + 1;
  spec.init = choices.pick_as<Init>(
      "init", {{"before_wrapping", 60},
               {"meta", 38},
               {"meta_unfilled", 1},
               {"meta_without_storage", 1},
               {"other_seeds", fsdp.kind == DataParallel::kReplicate ? 6 : 0}});
  spec.frozen = choices.pick_as<Frozen>("frozen", {{"none", 80},
                                                   {"embedding", 5},
                                                   {"norms", 3},
                                                   {"all_but_adapters", 5},
                                                   {"first_block", 4},
                                                   {"biases", 3}});
  spec.checkpointing = choices.pick_as<Checkpointing>(
      "checkpointing", {{"none", 65}, {"blocks", 20}, {"selective", 8}, {"halves", 7}});
  spec.optimizer = choices.pick_as<OptimizerKind>(
      "optimizer", {{"sgd", 45}, {"adamw", 35}, {"stock_sgd", 10}, {"stock_adamw", 10}});
  spec.accumulate = choices.pick_as<Accumulate>("accumulate", {{"reduce_each", 50},
                                                               {"reduce_last", 20},
                                                               {"overlapped", 10},
                                                               {"keep_unsharded", 10},
                                                               {"all_reduce_last", 10}});
  spec.loss = choices.pick_as<Loss>(
      "loss", {{"squares", 30}, {"cross_entropy", 45}, {"loss_parallel", 25}});
  spec.loss_in_forward = choices.chance("loss.in_forward", 40);
  spec.clip = choices.chance("clip", 20);
  spec.evaluate = choices.chance("evaluate", 20);
  return spec;
}

// Draws tensor-parallel plans. The correct plan is Megatron's: column-wise first projections and
// row-wise last projections. A plan entry may get a mistake, such as a wrong layout; the library
// must then redistribute.
enum class Between { kWhole, kReplicated, kSequence };

/// The tensor-parallel styles that a module supports.
enum class Fits { kLinear, kTokenwise, kHooksOnly };

/// A module name, and the style that it needs in a correct plan; nullopt if it needs none.
struct Candidate {
  std::string pattern;
  std::optional<StyleSpec> style;
  Fits fits = Fits::kLinear;
  /// Whether the style's input or output is local. The fuzzer adds no mistake to such a style.
  bool agreed = false;
};

StyleSpec colwise(Placement output, bool local = false) {
  return {.kind = StyleKind::kColwise, .output = output, .local = local};
}

StyleSpec rowwise(Placement output, bool local = false) {
  return {.kind = StyleKind::kRowwise, .output = output, .local = local};
}

/// Whether every rank has the style's whole output. If not, the output cannot be a plain tensor.
bool is_whole(const StyleSpec& style) {
  return style.kind != StyleKind::kSequence && style.kind != StyleKind::kFusedColwise &&
         std::holds_alternative<Replicate>(style.output);
}

Between draw_between(Choices& choices) {
  // "plain": modules return plain, replicated tensors, which is the default of PyTorch's styles.
  return choices.pick_as<Between>("plan", {{"plain", 40}, {"distributed", 25}, {"sequence", 35}});
}

bool draw_local(Choices& choices) {
  return draw_between(choices) == Between::kWhole && choices.chance("plan.local", 40);
}

class PlanDraft {
 public:
  PlanDraft(const Case& c, Choices& choices)
      : model_(c.model), train_(c.train), ranks_(c.mesh.tensor), choices_(choices) {
    between_ = draw_between(choices);
    local_ = draw_local(choices);
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
  void add(std::string pattern, std::optional<StyleSpec> style = {}, bool agreed = false) {
    candidates_.push_back({std::move(pattern), style, Fits::kLinear, agreed});
  }

  void add_other(std::string pattern, Fits fits, std::optional<StyleSpec> style = {}) {
    candidates_.push_back({std::move(pattern), style, fits});
  }

  /// Adds a module that computes each token separately. If tensors between modules are plain, the
  /// module needs no style.
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

  /// Adds the first projection of attention or of the MLP, with the layers of its LoRA adapter.
  void add_into(const std::string& pattern, bool local, bool adapter) {
    add(pattern + (adapter ? ".base" : ""), colwise(Shard{-1}, local), local);
    if (adapter) {
      add(pattern + ".a");
      add(pattern + ".b", choices_.chance("plan.adapter", 50)
                              ? std::optional<StyleSpec>(colwise(Shard{-1}))
                              : std::nullopt);
    }
  }

  /// Adds a fused weight of `parts` equal parts. With the style kColwise, a rank's rows can belong
  /// to two parts, and using a single part then gathers the weight.
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

  /// Whether attention is correct if its projections return local tensors with this rank's heads.
  bool runs_on_heads() const {
    const AttentionSpec& spec = model_.attend;
    const std::int64_t kv = spec.key_value_heads;
    return model_.heads % ranks_ == 0 && kv % ranks_ == 0 && (!spec.fused || kv == model_.heads) &&
           spec.query_key_norm == NormKind::kNone && spec.mask != Mask::kSlopes && !spec.gain &&
           !spec.adapter && !spec.dropout;
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

  /// Adds a norm over each head's features. The norm's input is (batch, sequence, heads, features).
  void add_query_key_norm(const std::string& pattern) {
    const auto kind =
        choices_.pick("plan.query_key_norm", {{"heads", 50}, {"none", 25}, {"replicate", 25}});
    const std::vector<std::optional<StyleSpec>> styles{
        StyleSpec{.kind = StyleKind::kSequence, .dim = 2}, std::nullopt,
        StyleSpec{.kind = StyleKind::kReplicate}};
    add_other(pattern, Fits::kTokenwise, styles[kind]);
  }

  /// Whether the MLP is correct on a local tensor that contains only this rank's features.
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
      add_experts(name + ".mixture");
    } else {
      add_projections(name);
    }
    if (model_.dropout != DropoutKind::kNone) {
      add_tokenwise("blocks.*.dropout2");
    }
  }

  void add_experts(const std::string& name) {
    add(name + ".gate",
        local_ || choices_.chance("plan.router", 50)
            ? std::nullopt
            : std::optional<StyleSpec>(StyleSpec{.kind = StyleKind::kSequence, .dim = 0}));
    if (model_.feed.experts.shared) {
      add_into(name + ".shared_experts.gate_proj", false, false);
      add_into(name + ".shared_experts.up_proj", false, false);
      add_out_of(name + ".shared_experts.down_proj", false, false);
    }
  }

  void add_projections(const std::string& name) {
    const MlpSpec& spec = model_.feed;
    // fused_colwise_parallel() knows the parts of a fused weight only in Tessera's own Linear.
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
  bool local_ = false;
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

/// Draws a correct plan, or a plan with mistakes: missing entries, wrong styles or wrong options.
/// Styles with local tensors get no mistakes, because the library cannot detect these.
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

}  // namespace

Case draw_case(std::uint64_t seed, Choices& choices) {
  Case result;
  result.seed = seed;
  result.model = draw_model(choices);
  result.mesh = draw_mesh(choices);
  if (!result.model.mlp || result.model.feed.kind != MlpKind::kExperts) {
    result.mesh.experts = 1;
  }
  result.fsdp = draw_fsdp(choices, result.mesh);
  if (result.fsdp.kind == DataParallel::kReplicate) {
    result.mesh.experts = 1;  // replicate() cannot use another mesh for experts.
  }
  result.train = draw_train(choices, result.fsdp);
  if (result.mesh.tensor > 1) {
    result.plan = draw_plan(result, choices);
  }
  if (!result.plan.empty()) {
    // With tensor parallelism, experts accept only a distributed input.
    result.mesh.experts_on_tensor =
        choices.chance("mesh.experts_on_tensor", draw_local(choices) ? 10 : 90);
  }
  result.planted = choices.pick_as<Planted>("planted", {{"nothing", 1}, {"wrong_gradient", 0}});
  return result;
}

}  // namespace tessera::fuzz
