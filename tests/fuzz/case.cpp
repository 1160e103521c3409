#include "fuzz/case.h"

#include <utility>

#include "tessera/core/error.h"

namespace tessera::fuzz {
namespace {

/// A number that depends on every bit of the seed and the name: FNV-1a, mixed by splitmix64.
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

std::string to_string(const Choices::Labels& labels) {
  std::string text;
  for (const auto& [name, label] : labels) {
    text += (text.empty() ? "" : ", ") + name + "=" + label;
  }
  return text;
}

// Sizes are small; some divide by the ranks of a mesh and some don't. Unusual options are rare: a
// case with many of them is refused for one and tests none of the others.
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
  spec.temperature = choices.chance("attention.temperature", 5);
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
      {{"plain", 40}, {"gated", 25}, {"fused_kernel", 20}, {"fused_weight", 8}, {"experts", 8}});
  spec.inner = choices.number("mlp.inner", {12, 8, 10, 24});
  spec.bias = choices.chance("mlp.bias", 40);
  spec.linear = choices.chance("mlp.stock_linear", 4) ? LinearKind::kStock : LinearKind::kOwn;
  spec.activation = choices.pick_as<Activation>("mlp.activation", {{"gelu", 40},
                                                                   {"relu", 20},
                                                                   {"centred", 2},
                                                                   {"composite", 4},
                                                                   {"kernel_of_aten", 4},
                                                                   {"with_autograd", 6},
                                                                   {"without_rule", 3},
                                                                   {"random_multiply", 1}});
  spec.along = choices.pick_as<Along>("mlp.along", {{"none", 86},
                                                    {"softmax", 2},
                                                    {"cumsum", 2},
                                                    {"sort", 2},
                                                    {"flip", 2},
                                                    {"exchanged_halves", 2},
                                                    {"standardised", 2},
                                                    {"below_largest", 2}});
  spec.inner_bias = choices.chance("mlp.inner_bias", 6);
  spec.auxiliary_loss = choices.chance("mlp.auxiliary_loss", 8);
  spec.middle_norm = draw_norm(choices, "mlp.middle_norm", 700);
  spec.dropout = draw_dropout(choices, "mlp.dropout");
  spec.adapter = choices.chance("mlp.adapter", 12);
  spec.calls_forward = choices.chance("mlp.calls_forward", 2);
  spec.checkpoint_call = choices.chance("mlp.checkpoint_call", 8);
  spec.skips_empty = choices.chance("mlp.skips_empty", 8);
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
      "residual_scale", {{"none", 90}, {"vector", 5}, {"scalar", 4}, {"stray", 1}});
  spec.part_scale =
      choices.pick_as<PartScale>("local_map_scale", {{"no", 95}, {"yes", 3}, {"from_local", 2}});
  if (!spec.folded) {
    spec.token_mix =
        choices.pick_as<TokenMix>("token_mix", {{"none", 90}, {"running_mean", 5}, {"roll", 5}});
  }
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
  return {.replicas = shape.replicas,
          .data = shape.data,
          .tensor = shape.tensor,
          .tensor_first = choices.chance("mesh.tensor_first", 10)};
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
  spec.units = choices.pick_as<Units>(
      "fsdp.units", {{"root", 25}, {"blocks", 40}, {"halves", 15}, {"policy", 15}});
  spec.reshard =
      choices.pick_as<Reshard>("fsdp.reshard", {{"default", 60}, {"always", 20}, {"never", 20}});
  spec.may_be_unused = choices.chance("fsdp.may_be_unused", 5);
  spec.offload = choices.chance("fsdp.offload", 8);
  spec.before_tensor_parallel = choices.chance("fsdp.before_tensor_parallel", 2);
  spec.prefetch = choices.chance("fsdp.prefetch", 10);
  if (spec.kind == DataParallel::kFullyShard) {
    spec.placement = choices.pick_as<ShardPlacement>(
        "fsdp.placement", {{"default", 85}, {"last", 8}, {"replicate_vectors", 7}});
    const bool halves = mesh.data % 2 == 0;
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

}  // namespace

Case draw_case(std::uint64_t seed, Choices& choices) {
  Case result;
  result.seed = seed;
  result.model = draw_model(choices);
  result.mesh = draw_mesh(choices);
  result.fsdp = draw_fsdp(choices, result.mesh);
  result.train = draw_train(choices, result.fsdp);
  if (result.mesh.tensor > 1) {
    result.plan = draw_plan(result, choices);
  }
  result.planted = choices.pick_as<Planted>(
      "planted",
      {{"nothing", 1}, {"wrong_gradient", 0}, {"late_error", 0}, {"crash", 0}, {"hang", 0}});
  return result;
}

}  // namespace tessera::fuzz
