// Plans as people write them. The right one is Megatron's: column-wise into each half of a block,
// row-wise out of it; between the halves activations are plain, distributed, or split along the
// sequence. Then mistakes are made with some probability, entry by entry.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/case.h"

namespace tessera::fuzz {
namespace {

enum class Between { kPlain, kDistributed, kSequence };

/// A module that a plan could name, and its right style; none where the plan may leave it out.
struct Candidate {
  std::string pattern;
  std::optional<StyleSpec> style;
};

StyleSpec colwise(Placement input, Placement output, bool local) {
  return {.kind = StyleKind::kColwise, .input = input, .output = output, .local = local};
}

StyleSpec rowwise(Placement input, Placement output, bool local) {
  return {.kind = StyleKind::kRowwise, .input = input, .output = output, .local = local};
}

class PlanDraft {
 public:
  PlanDraft(const ModelSpec& model, const TrainSpec& train, Choices& choices)
      : model_(model), train_(train), choices_(choices) {
    between_ =
        choices.pick_as<Between>("plan", {{"plain", 40}, {"distributed", 25}, {"sequence", 35}});
    sequence_dim_ = model.folded ? 0 : 1;
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
  bool plain() const { return between_ == Between::kPlain; }

  void add(std::string pattern, std::optional<StyleSpec> style = {}) {
    candidates_.push_back({std::move(pattern), style});
  }

  /// Of what works on each token by itself. Plain activations between the halves are whole on
  /// every rank: such modules need no entry.
  void add_tokenwise(const std::string& pattern) {
    if (plain()) {
      add(pattern);
    } else if (between_ == Between::kDistributed) {
      add(pattern, StyleSpec{.kind = StyleKind::kReplicate, .local = false});
    } else {
      add(pattern, StyleSpec{.kind = StyleKind::kSequence, .local = false, .dim = sequence_dim_});
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
    const bool none = kind == 2 && plain();
    if (none) {
      add("embed");
    } else if (kind == 0 || model_.tied) {
      add("embed", rowwise(Replicate{}, stream_, plain()));
    } else {
      add("embed", colwise(Replicate{}, stream_, plain()));
    }
    if (model_.position) {
      add_tokenwise("position");
    }
    if (model_.dropout != DropoutKind::kNone) {
      add_tokenwise("dropout");
    }
  }

  void add_gather(const std::string& pattern) {
    if (!plain()) {
      add(pattern, StyleSpec{.kind = StyleKind::kPrepareInput,
                             .input = stream_,
                             .output = Replicate{},
                             .local = false});
    }
  }

  void add_into(const std::string& pattern, bool local, bool adapter) {
    add(pattern + (adapter ? ".base" : ""), colwise(Replicate{}, Shard{-1}, local));
    if (adapter) {
      add(pattern + ".a", plain() ? std::optional<StyleSpec>{}
                                  : StyleSpec{.kind = StyleKind::kReplicate, .local = false});
      add(pattern + ".b", colwise(Replicate{}, Shard{-1}, local));
    }
  }

  void add_out_of(const std::string& pattern, bool adapter) {
    const StyleSpec out = rowwise(Shard{-1}, stream_, plain());
    add(pattern + (adapter ? ".base" : ""), out);
    if (adapter) {
      add(pattern + ".a", rowwise(Shard{-1}, Replicate{}, plain()));
      add(pattern + ".b",
          plain() ? std::optional<StyleSpec>{} : colwise(Replicate{}, stream_, false));
    }
  }

  void add_attention() {
    const AttentionSpec& spec = model_.attend;
    const std::string name = "blocks.*.attention";
    add_norm("blocks.*.norm1", model_.norm);
    add_gather(name);
    const bool local = !choices_.chance("plan.attention_distributed", 30);
    if (spec.fused) {
      add_into(name + ".qkv_proj", local, false);
    } else {
      add_into(name + ".q_proj", local, spec.adapter);
      add_into(name + ".k_proj", local, false);
      add_into(name + ".v_proj", local, false);
    }
    if (spec.query_key_norm != NormKind::kNone) {
      add_query_key_norm(name + ".q_norm", local);
      add_query_key_norm(name + ".k_norm", local);
    }
    add_out_of(name + ".o_proj", false);
    if (model_.dropout != DropoutKind::kNone) {
      add_tokenwise("blocks.*.dropout1");
    }
  }

  /// Heads are dimension 2 where it is called.
  void add_query_key_norm(const std::string& pattern, bool local) {
    const StyleSpec heads{.kind = StyleKind::kSequence, .local = local, .dim = 2};
    const auto kind =
        choices_.pick("plan.query_key_norm", {{"heads", 50}, {"none", 25}, {"replicate", 25}});
    if (kind == 1) {
      add(pattern);
    } else {
      add(pattern, kind == 0 ? heads : StyleSpec{.kind = StyleKind::kReplicate, .local = local});
    }
  }

  void add_mlp() {
    const MlpSpec& spec = model_.feed;
    const std::string name = "blocks.*.mlp";
    add_norm("blocks.*.norm2", model_.norm);
    add_gather(name);
    const bool local = !choices_.chance("plan.mlp_distributed", 50);
    if (spec.kind == MlpKind::kFusedWeight) {
      add_into(name + ".gate_up_proj", local, false);
    } else {
      add_into(name + ".up_proj", local, false);
    }
    if (spec.kind == MlpKind::kGated || spec.kind == MlpKind::kGatedFusedKernel) {
      add_into(name + ".gate_proj", local, false);
    }
    if (spec.middle_norm != NormKind::kNone) {
      add(name + ".middle_norm", local ? std::optional<StyleSpec>{}
                                       : StyleSpec{.kind = StyleKind::kReplicate, .local = false});
    }
    if (spec.dropout != DropoutKind::kNone) {
      add(name + ".dropout");
    }
    add_out_of(name + ".down_proj", spec.adapter);
    if (model_.dropout != DropoutKind::kNone) {
      add_tokenwise("blocks.*.dropout2");
    }
  }

  void add_head() {
    add_norm("norm", model_.final_norm);
    if (model_.local_map_scale) {
      add_tokenwise("scale");
    }
    if (train_.loss == Loss::kLossParallel) {
      add("head", colwise(stream_, Shard{-1}, false));
    } else if (plain() && choices_.chance("plan.head_left_out", 30)) {
      add("head");
    } else {
      add("head", colwise(stream_, Replicate{}, true));
    }
  }

  const ModelSpec& model_;
  const TrainSpec& train_;
  Choices& choices_;
  Between between_ = Between::kPlain;
  std::int64_t sequence_dim_ = 1;
  Placement stream_ = Replicate{};
  std::vector<Candidate> candidates_;
};

Placement draw_placement(Choices& choices, const std::string& name) {
  const auto kind = choices.pick(name, {{"R", 3}, {"S-1", 3}, {"S0", 1}, {"S1", 1}});
  const std::int64_t dims[] = {0, -1, 0, 1};
  return kind == 0 ? Placement(Replicate{}) : Shard{dims[kind]};
}

StyleSpec draw_style(Choices& choices, const std::string& name) {
  StyleSpec spec;
  spec.kind = choices.pick_as<StyleKind>(name + ".kind", {{"colwise", 4},
                                                          {"rowwise", 4},
                                                          {"sequence", 3},
                                                          {"replicate", 3},
                                                          {"prepare_input", 1},
                                                          {"prepare_output", 1}});
  spec.input = draw_placement(choices, name + ".input");
  spec.output = draw_placement(choices, name + ".output");
  spec.local = !choices.chance(name + ".distributed", 50);
  spec.dim = choices.number(name + ".dim", {1, 0, 2});
  return spec;
}

/// What becomes of the right style of one entry.
std::optional<StyleSpec> with_mistake(std::optional<StyleSpec> style, const std::string& name,
                                      Choices& choices) {
  enum class Mistake { kNone, kForgotten, kOtherStyle, kOtherLocal, kOtherOutput, kOtherInput };
  const auto mistake = choices.pick_as<Mistake>(name, {{"right", 76},
                                                       {"forgotten", 7},
                                                       {"other_style", 5},
                                                       {"other_local", 5},
                                                       {"other_output", 4},
                                                       {"other_input", 3}});
  if (mistake == Mistake::kForgotten) {
    return std::nullopt;
  }
  if (mistake == Mistake::kOtherStyle) {
    return draw_style(choices, name);
  }
  if (style && mistake == Mistake::kOtherLocal) {
    style->local = !style->local;
  } else if (style && mistake == Mistake::kOtherOutput) {
    style->output = draw_placement(choices, name + ".output");
  } else if (style && mistake == Mistake::kOtherInput) {
    style->input = draw_placement(choices, name + ".input");
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

std::vector<PlanEntry> draw_plan(const ModelSpec& model, const TrainSpec& train, Choices& choices) {
  if (choices.chance("plan.none", 4)) {
    return {};
  }
  const bool mistakes = choices.chance("plan.mistakes", 40);
  const bool apart = choices.chance("plan.block_by_block", 20);
  std::vector<PlanEntry> plan;
  for (const Candidate& candidate : PlanDraft(model, train, choices).candidates()) {
    for (const std::string& pattern : patterns_of(candidate.pattern, model.depth, apart)) {
      const std::optional<StyleSpec> style =
          mistakes ? with_mistake(candidate.style, "plan." + pattern, choices) : candidate.style;
      if (style) {
        plan.push_back({pattern, *style});
      }
    }
  }
  return plan;
}

}  // namespace tessera::fuzz
