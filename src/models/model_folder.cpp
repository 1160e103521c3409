// The files of a model folder: config.json, the tokenizer, and the tokens that begin and end texts.

#include "tessera/models/llama_config.h"
#include "tessera/models/tokenizer.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/detail/files.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"
#include "tessera/data/detail/tokenizers.h"

namespace tessera::models {
namespace {

/// The largest accepted size of config.json, far above the size of any real config.json. The file
/// can come from an untrusted source.
constexpr std::uint64_t kMaxConfigBytes = 10'000'000;

/// Parses a JSON object. Limits the nesting depth, because formatting a value is recursive.
nlohmann::json parse_object(const std::string& text, const std::string& origin) {
  try {
    const std::size_t begin = text.find_first_not_of(" \t\r\n");
    const std::string_view object =
        std::string_view(text).substr(begin == std::string::npos ? 0 : begin);
    tessera::detail::check_strict_json(object, {.depth = 16});
    return nlohmann::json::parse(object);
  } catch (const Error& error) {
    fail(origin, " is not a JSON object (", error.what(), "); expected a Hugging Face config.json");
  }
}

class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& json, const std::string& origin)
      : json_(json), origin_(origin) {}

  bool names(const char* key) const { return json_.contains(key); }
  // Whether config.json has the key `key` with a value other than null. Hugging Face writes null
  // for "not set".
  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }

  std::int64_t positive(const char* key) const {
    TESSERA_CHECK(has(key), origin_, ": \"", key, "\" is missing; a model's config.json needs it");
    return positive_or(key, 0);
  }

  /// A size must be below 2^31, so that the product of two sizes fits into 64 bits.
  std::int64_t positive_or(const char* key, std::int64_t otherwise) const {
    if (!has(key)) {
      return otherwise;
    }
    const nlohmann::json& value = json_.at(key);
    TESSERA_CHECK(value.is_number_integer() && value.get<std::int64_t>() > 0 &&
                      value.get<std::int64_t>() < (std::int64_t{1} << 31),
                  origin_, ": \"", key, "\" is ", value.dump(), "; it must be a positive integer");
    return value.get<std::int64_t>();
  }

  double number(const char* key) const {
    TESSERA_CHECK(has(key), origin_, ": \"", key, "\" is missing, but rope scaling needs it");
    const nlohmann::json& value = json_.at(key);
    TESSERA_CHECK(value.is_number() && value.get<double>() > 0, origin_, ": \"", key, "\" is ",
                  value.dump(), "; it must be a positive number");
    return value.get<double>();
  }

  double number_or(const char* key, double otherwise) const {
    return has(key) ? number(key) : otherwise;
  }

  std::string text(const char* key) const {
    const nlohmann::json& value = json_.at(key);
    TESSERA_CHECK(value.is_string(), origin_, ": \"", key, "\" is ", value.dump(),
                  "; it must be a string");
    return value.get<std::string>();
  }

  bool flag_or(const char* key, bool otherwise) const {
    if (!has(key)) {
      return otherwise;
    }
    const nlohmann::json& value = json_.at(key);
    TESSERA_CHECK(value.is_boolean(), origin_, ": \"", key, "\" is ", value.dump(),
                  "; it must be true or false");
    return value.get<bool>();
  }

  /// Reads token ids from config.json: the value of `key` is one id or an array of ids.
  std::vector<std::int64_t> tokens(const char* key, std::int64_t vocabulary) const {
    if (!has(key)) {
      return {};
    }
    const nlohmann::json& value = json_.at(key);
    std::vector<std::int64_t> ids;
    for (const nlohmann::json& id : value.is_array() ? value : nlohmann::json::array({value})) {
      TESSERA_CHECK(id.is_number_unsigned() &&
                        id.get<std::uint64_t>() < static_cast<std::uint64_t>(vocabulary),
                    origin_, ": \"", key, "\" is ", value.dump(),
                    "; tokens must be integers below the vocabulary size, ", vocabulary);
      ids.push_back(id.get<std::int64_t>());
    }
    return ids;
  }

  /// Throws Error unless config.json's `key` is absent, null, or one of the allowed values.
  void only(const char* key, std::initializer_list<nlohmann::json> allowed,
            const char* feature) const {
    if (!has(key)) {
      return;
    }
    for (const nlohmann::json& value : allowed) {
      if (json_.at(key) == value) {
        return;
      }
    }
    fail(origin_, ": \"", key, "\" is ", json_.at(key).dump(), ", but ", feature,
         " not implemented; use a model without this feature");
  }

  const nlohmann::json& at(const char* key) const { return json_.at(key); }
  const std::string& origin() const { return origin_; }

 private:
  const nlohmann::json& json_;
  const std::string& origin_;
};

using Json = nlohmann::json;

/// The largest accepted number of layers, far above that of any real model. config.json can come
/// from an untrusted source.
constexpr std::int64_t kMaxLayers = 10'000;

/// What config.json does not say about a model type ("llama", "qwen2").
struct Architecture {
  const char* type;
  const char* class_name;
  bool query_key_value_bias;  ///< whether q, k, v have biases in every model of this type
  bool query_key_norm;
  bool begins_texts;    ///< whether the tokenizer begins a text with bos_token_id
  const char* experts;  ///< config.json's key for the number of experts; nullptr: no experts
  bool has_attention_bias, has_mlp_bias;  ///< whether config.json can enable attention/MLP biases
};
constexpr std::array<Architecture, 7> kArchitectures{{
    {"llama", "LlamaForCausalLM", false, false, true, nullptr, true, true},
    {"mistral", "MistralForCausalLM", false, false, true, nullptr, false, false},
    {"qwen2", "Qwen2ForCausalLM", true, false, false, nullptr, false, false},
    {"qwen3", "Qwen3ForCausalLM", false, true, false, nullptr, true, false},
    {"mixtral", "MixtralForCausalLM", false, false, true, "num_local_experts", false, false},
    {"qwen3_moe", "Qwen3MoeForCausalLM", false, true, false, "num_experts", true, false},
    {"olmoe", "OlmoeForCausalLM", false, true, false, "num_experts", true, false},
}};

/// A config.json without "model_type" is read as a Llama.
const Architecture& architecture_of(const ConfigReader& reader) {
  const std::string type = reader.has("model_type") ? reader.text("model_type") : "llama";
  const auto* const found = std::ranges::find(kArchitectures, type, &Architecture::type);
  TESSERA_CHECK(found != kArchitectures.end(), reader.origin(), ": \"model_type\" is \"", type,
                "\", but only llama, mistral, qwen2, qwen3, mixtral, qwen3_moe and olmoe are "
                "implemented; use a model of one of these types");
  reader.only("architectures", {Json::array({found->class_name})},
              "architectures other than that of the model_type are");
  return *found;
}

/// Throws Error for settings in config.json that would change the model's results but are not
/// implemented. Ignores other keys, such as torch_dtype.
void refuse_unimplemented(const ConfigReader& reader) {
  reader.only("hidden_act", {"silu", "swish"}, "activations other than silu are");
  reader.only("pretraining_tp", {1}, "pretraining_tp is");
  reader.only("partial_rotary_factor", {1, 1.0}, "partial rotary embedding is");
  reader.only("quantization_config", {}, "quantised weights are");
  reader.only("is_causal", {true}, "attention to later tokens is");
  reader.only("clip_qkv", {}, "clipped queries, keys and values are");
  reader.only("router_jitter_noise", {0, 0.0}, "noise in the router is");
}

void check_layer_types(const ConfigReader& reader, std::int64_t window) {
  if (!reader.has("layer_types")) {
    return;
  }
  const char* expected = window > 0 ? "sliding_attention" : "full_attention";
  for (const Json& layer : reader.at("layer_types")) {
    TESSERA_CHECK(
        layer == expected, reader.origin(), ": \"layer_types\" has ", layer.dump(),
        ", but the other keys make all layers ", expected,
        ", and layers that differ in attention are not implemented; use a model with equal layers");
  }
}

/// Mistral: "sliding_window" applies to all layers. Qwen: a window only with "use_sliding_window".
std::int64_t read_sliding_window(const ConfigReader& reader, const std::string& type) {
  if (type == "mistral" || type == "mixtral") {
    const std::int64_t missing = type == "mistral" ? 4096 : 0;
    return reader.names("sliding_window") ? reader.positive_or("sliding_window", 0) : missing;
  }
  reader.only("use_sliding_window", {false}, "layers that differ in attention are");
  if (type == "llama") {
    reader.only("sliding_window", {}, "sliding-window attention of a Llama is");
  }
  return 0;
}

RopeScaling::Kind scaling_kind(const ConfigReader& rope, const char* key) {
  using Kind = RopeScaling::Kind;
  static const std::map<std::string, Kind> kinds{{"default", Kind::kNone},
                                                 {"linear", Kind::kLinear},
                                                 {"llama3", Kind::kLlama3},
                                                 {"yarn", Kind::kYarn}};
  const std::string type = rope.has(key) ? rope.text(key) : "default";
  const auto found = kinds.find(type);
  TESSERA_CHECK(found != kinds.end(), rope.origin(), ": rope scaling is of type \"", type,
                "\", but only default, linear, llama3 and yarn are implemented; use a "
                "model with one of these");
  return found->second;
}

/// Returns YaRN's factor for cos and sin, for a context `scale` times as long as the original
/// context (equation 22 of Peng et al. 2023).
double yarn_scale(double scale) {
  return scale <= 1 ? 1 : 0.1 * std::log(scale) + 1;
}

/// Throws Error if config.json has two original_max_position_embeddings that differ (one in the
/// rope scaling), because versions of `transformers` differ in which value they use.
void check_original_positions(const ConfigReader& file, const RopeScaling& scaling) {
  constexpr const char* kKey = "original_max_position_embeddings";
  const bool takes = scaling.original_positions > 0;
  const std::int64_t said = file.positive_or(kKey, scaling.original_positions);
  TESSERA_CHECK(!takes || said == scaling.original_positions, file.origin(), ": \"", kKey, "\" is ",
                said, ", but the rope scaling has ", scaling.original_positions,
                "; remove the wrong value");
}

/// Reads a rope scaling. `positions`: the model's number of positions, used if the rope scaling has
/// no "original_max_position_embeddings".
RopeScaling read_scaling(const ConfigReader& rope, std::int64_t positions) {
  using Kind = RopeScaling::Kind;
  RopeScaling s;
  s.kind = scaling_kind(rope, rope.has("rope_type") ? "rope_type" : "type");
  // If config.json has both "rope_type" and "type", they must be equal, because versions of
  // `transformers` differ in which of the two keys they read.
  TESSERA_CHECK(!rope.has("rope_type") || !rope.has("type") || scaling_kind(rope, "type") == s.kind,
                rope.origin(), ": rope scaling has \"rope_type\" ", rope.at("rope_type").dump(),
                " and \"type\" ", rope.at("type").dump(), "; remove the wrong key");
  rope.only("partial_rotary_factor", {1, 1.0}, "partial rotary embedding is");
  if (s.kind == Kind::kNone) {
    rope.only("factor", {1, 1.0}, "a factor without a type of rope scaling is");
    return s;
  }
  s.factor = rope.number("factor");
  if (s.kind == Kind::kLinear) {
    return s;
  }
  s.original_positions = rope.positive_or("original_max_position_embeddings", positions);
  TESSERA_CHECK(
      s.original_positions > 0, rope.origin(),
      ": the rope scaling needs \"max_position_embeddings\", the context length of the model");
  if (s.kind == Kind::kLlama3) {
    s.low_freq_factor = rope.number("low_freq_factor");
    s.high_freq_factor = rope.number("high_freq_factor");
    TESSERA_CHECK(s.high_freq_factor > s.low_freq_factor, rope.origin(),
                  ": \"high_freq_factor\" is ", s.high_freq_factor,
                  "; it must be greater than \"low_freq_factor\", which is ", s.low_freq_factor);
  }
  if (s.kind == Kind::kYarn) {
    s.beta_fast = rope.number_or("beta_fast", s.beta_fast);
    s.beta_slow = rope.number_or("beta_slow", s.beta_slow);
    // As in `transformers`: a missing "truncate" means true, a "truncate" of null means false.
    s.truncate = rope.flag_or("truncate", !rope.names("truncate"));
    rope.only("mscale", {}, "mscale of YaRN is");
    rope.only("mscale_all_dim", {}, "mscale_all_dim of YaRN is");
    s.attention_factor = rope.number_or("attention_factor", yarn_scale(s.factor));
  }
  return s;
}

Rope read_rope_object(const ConfigReader& reader, const char* key, double default_theta) {
  const Json& object = reader.at(key);
  TESSERA_CHECK(object.is_object(), reader.origin(), ": \"", key, "\" is ", object.dump(),
                "; it must be an object or null");
  const ConfigReader inner(object, reader.origin());
  for (const auto& [name, value] : object.items()) {
    TESSERA_CHECK(!value.is_object(), reader.origin(), ": \"", key, "\" has \"", name,
                  "\", but layers with different rotary embeddings are not implemented; use a "
                  "model with equal layers");
  }
  Rope rope;
  rope.theta = reader.number_or("rope_theta", default_theta);
  TESSERA_CHECK(
      !reader.has("rope_theta") || inner.number_or("rope_theta", rope.theta) == rope.theta,
      reader.origin(), ": \"rope_theta\" is ", rope.theta, ", but \"", key, "\" has ",
      inner.number_or("rope_theta", rope.theta), "; remove the wrong value");
  rope.theta = inner.number_or("rope_theta", rope.theta);
  rope.scaling = read_scaling(inner, reader.positive_or("max_position_embeddings", 0));
  check_original_positions(reader, rope.scaling);
  return rope;
}

/// Older config.json files have rope_theta and rope_scaling; newer files have rope_parameters.
Rope read_rope(const ConfigReader& reader, double default_theta) {
  const bool older = reader.has("rope_scaling"), newer = reader.has("rope_parameters");
  if (!older && !newer) {
    Rope rope;
    rope.theta = reader.number_or("rope_theta", default_theta);
    return rope;
  }
  const auto read = [&](const char* key) { return read_rope_object(reader, key, default_theta); };
  const Rope rope = read(older ? "rope_scaling" : "rope_parameters");
  TESSERA_CHECK(!older || !newer || read("rope_parameters") == rope, reader.origin(),
                ": \"rope_scaling\" and \"rope_parameters\" set different rotary embeddings; "
                "remove the wrong key");
  return rope;
}

/// Returns the number of positions of a model after rope scaling. For some models,
/// max_position_embeddings already includes the scaling.
std::int64_t read_max_positions(const ConfigReader& reader, const RopeScaling& scaling) {
  const std::int64_t said = reader.positive_or("max_position_embeddings", 0);
  const std::int64_t original = scaling.original_positions > 0 ? scaling.original_positions : said;
  const double scaled = scaling.factor * static_cast<double>(original);
  // The largest accepted number of positions, far above that of any real model. config.json can
  // come from an untrusted source.
  constexpr double kMost = 1e15;
  return std::max(said, static_cast<std::int64_t>(std::min(scaled, kMost)));
}

/// Reads the settings of mixtures of experts. Missing keys have the defaults of `transformers`.
void read_experts(const ConfigReader& reader, const Architecture& architecture, LlamaConfig& c) {
  if (architecture.experts == nullptr) {
    return;
  }
  const std::string type = architecture.type;
  c.num_experts = reader.positive(architecture.experts);
  c.num_experts_per_tok = reader.positive("num_experts_per_tok");
  TESSERA_CHECK(c.num_experts_per_tok <= c.num_experts, reader.origin(),
                ": \"num_experts_per_tok\" is ", c.num_experts_per_tok, ", but there are ",
                c.num_experts, " experts; it must not be larger than the number of experts");
  c.mixtral_names = type == "mixtral";
  c.norm_over_heads = type == "olmoe";
  c.norm_topk_prob = c.mixtral_names || reader.flag_or("norm_topk_prob", false);
  const bool is_qwen = type == "qwen3_moe";
  c.moe_intermediate_size =
      is_qwen ? reader.positive("moe_intermediate_size") : c.intermediate_size;
  if (reader.flag_or("output_router_logits", false)) {
    const char* key = "router_aux_loss_coef";
    const bool is_0 = reader.has(key) && reader.at(key) == 0;
    c.router_aux_loss_coef = is_0 ? 0 : reader.number_or(key, c.norm_over_heads ? 0.01 : 0.001);
  }
  if (!is_qwen) {
    return;
  }
  const std::int64_t step = reader.positive_or("decoder_sparse_step", 1);
  const Json dense = reader.has("mlp_only_layers") ? reader.at("mlp_only_layers") : Json::array();
  TESSERA_CHECK(dense.is_array() && std::ranges::all_of(dense, &Json::is_number_integer),
                reader.origin(), ": \"mlp_only_layers\" is ", dense.dump(),
                "; it must be a list of layer numbers");
  for (std::int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    if ((layer + 1) % step != 0 || std::ranges::find(dense, Json(layer)) != dense.end()) {
      c.dense_layers.push_back(layer);
    }
  }
  if (std::ssize(c.dense_layers) == c.num_hidden_layers) {
    c.num_experts = 0;
    c.dense_layers.clear();
  }
}

}  // namespace

LlamaConfig detail::parse_config(const std::string& text, const std::string& origin) {
  const Json json = parse_object(text, origin);
  const ConfigReader reader(json, origin);
  const Architecture& architecture = architecture_of(reader);
  refuse_unimplemented(reader);
  LlamaConfig c;
  c.vocab_size = reader.positive("vocab_size");
  c.hidden_size = reader.positive("hidden_size");
  c.intermediate_size = reader.positive("intermediate_size");
  c.num_hidden_layers = reader.positive("num_hidden_layers");
  TESSERA_CHECK(c.num_hidden_layers <= kMaxLayers, origin, ": num_hidden_layers is ",
                c.num_hidden_layers, "; the maximum is ", kMaxLayers);
  c.num_attention_heads = reader.positive("num_attention_heads");
  // A null "num_key_value_heads" means num_attention_heads. For a Llama the key can be missing; for
  // other model types a missing key throws, because their defaults in `transformers` differ.
  const bool by_heads =
      architecture.type == std::string_view("llama") || reader.names("num_key_value_heads");
  c.num_key_value_heads = by_heads
                              ? reader.positive_or("num_key_value_heads", c.num_attention_heads)
                              : reader.positive("num_key_value_heads");
  // If "head_dim" is missing, hidden_size must be divisible by the number of heads.
  if (!reader.has("head_dim")) {
    TESSERA_CHECK(c.hidden_size % c.num_attention_heads == 0, origin, ": hidden_size ",
                  c.hidden_size, " is not a multiple of num_attention_heads ",
                  c.num_attention_heads, ", and head_dim is missing; set head_dim");
  }
  c.head_dim = architecture.type == std::string_view("qwen3")
                   ? reader.positive("head_dim")
                   : reader.positive_or("head_dim", c.hidden_size / c.num_attention_heads);
  const std::string type = architecture.type;
  c.rms_norm_eps =
      reader.number_or("rms_norm_eps", type == "mixtral" || type == "olmoe" ? 1e-5 : 1e-6);
  c.rope = read_rope(reader, type == "mixtral" ? 1e6 : 1e4);
  c.max_positions = read_max_positions(reader, c.rope.scaling);
  c.initializer_range = reader.number_or("initializer_range", c.initializer_range);
  const bool biases = reader.flag_or("attention_bias", false);
  c.query_key_value_bias = biases || architecture.query_key_value_bias;
  c.attention_output_bias = biases;
  c.mlp_bias = reader.flag_or("mlp_bias", false);
  const char* dropout = "attention_dropout";
  c.attention_dropout = reader.has(dropout) && reader.at(dropout) != 0 ? reader.number(dropout) : 0;
  TESSERA_CHECK(architecture.has_attention_bias || !biases, origin, ": \"attention_bias\" of a ",
                architecture.type, " is not implemented; use a model without this bias");
  TESSERA_CHECK(architecture.has_mlp_bias || !c.mlp_bias, origin, ": \"mlp_bias\" of a ",
                architecture.type, " is not implemented; use a model without this bias");
  c.query_key_norm = architecture.query_key_norm;
  read_experts(reader, architecture, c);
  c.begins_texts = architecture.begins_texts;
  c.sliding_window = read_sliding_window(reader, architecture.type);
  check_layer_types(reader, c.sliding_window);
  c.tie_word_embeddings = reader.flag_or("tie_word_embeddings", false);
  // The text of config.json is stored, because exports write the text unchanged, including keys
  // that Tessera does not read.
  c.json = text;
  TESSERA_CHECK(c.num_attention_heads % c.num_key_value_heads == 0, origin,
                ": num_attention_heads ", c.num_attention_heads,
                " is not a multiple of num_key_value_heads ", c.num_key_value_heads);
  TESSERA_CHECK(c.head_dim % 2 == 0, origin, ": head_dim is ", c.head_dim,
                "; rotary embedding needs an even head_dim");
  return c;
}

LlamaConfig read_config(const std::filesystem::path& file) {
  return detail::parse_config(files::read_file(file, "a Hugging Face config.json", kMaxConfigBytes),
                              file.string());
}

/// Each tensor-parallel rank has whole heads, and all ranks have equally many heads.
void check_tensor_parallel(const LlamaConfig& config, std::int64_t tp) {
  const std::int64_t heads = config.num_attention_heads;
  const std::int64_t kv_heads = config.num_key_value_heads;
  TESSERA_CHECK(heads % tp == 0, "num_attention_heads ", heads,
                " can't be split at a tensor-parallel degree of ", tp,
                "; choose a degree that divides ", heads);
  TESSERA_CHECK(kv_heads % tp == 0 || tp % kv_heads == 0, "num_key_value_heads ", kv_heads,
                " can't be split or copied at a tensor-parallel degree of ", tp,
                ": neither number is a multiple of the other; choose a degree that divides ", heads,
                " heads, and divides ", kv_heads, " or is a multiple of ", kv_heads);
  TESSERA_CHECK(!config.norm_over_heads || kv_heads % tp == 0, "num_key_value_heads ", kv_heads,
                " can't be split at a tensor-parallel degree of ", tp,
                " with a norm over all heads; choose a degree that divides ", kv_heads);
}

bool has_experts(const LlamaConfig& config, std::int64_t layer) {
  return config.num_experts > 0 &&
         std::ranges::find(config.dense_layers, layer) == config.dense_layers.end();
}

std::int64_t key_value_copies(const LlamaConfig& config, std::int64_t tp) {
  return std::max(tp / config.num_key_value_heads, std::int64_t{1});
}

std::string describe_key_value_copies(const LlamaConfig& config, std::int64_t tp) {
  const std::int64_t copies = key_value_copies(config, tp);
  return copies == 1
             ? ""
             : tessera::detail::concat("key-value heads: ", config.num_key_value_heads, " on ", tp,
                                       " tensor-parallel ranks, each on ", copies, " of them");
}

/// The number of parameters is computed from the sizes in config.json, so that no rank needs to
/// create the whole model.
ParameterCount count_parameters(const LlamaConfig& c) {
  const std::int64_t embedding = c.vocab_size * c.hidden_size;
  const std::int64_t heads = c.num_attention_heads + c.num_key_value_heads;
  const std::int64_t norms = c.norm_over_heads ? heads * c.head_dim : 2 * c.head_dim;
  // Queries and output have num_attention_heads heads; keys and values have num_key_value_heads.
  const std::int64_t attention =
      2 * c.hidden_size * heads * c.head_dim +
      (c.query_key_value_bias ? (heads + c.num_key_value_heads) * c.head_dim : 0) +
      (c.attention_output_bias ? c.hidden_size : 0) + (c.query_key_norm ? norms : 0);
  const std::int64_t mlp = 3 * c.hidden_size * c.intermediate_size +
                           (c.mlp_bias ? 2 * c.intermediate_size + c.hidden_size : 0);
  const std::int64_t expert = 3 * c.hidden_size * c.moe_intermediate_size;
  const std::int64_t head = c.tie_word_embeddings ? 0 : embedding;
  const std::int64_t dense = c.num_experts > 0 ? std::ssize(c.dense_layers) : c.num_hidden_layers;
  const std::int64_t mixtures = c.num_hidden_layers - dense;
  const std::int64_t shared = embedding + head + c.hidden_size + dense * mlp +
                              mixtures * c.hidden_size * c.num_experts +
                              c.num_hidden_layers * (attention + 2 * c.hidden_size);
  return {.total = shared + mixtures * c.num_experts * expert,
          .embedding = embedding,
          .active = shared + mixtures * c.num_experts_per_tok * expert};
}

namespace {

/// Wraps a tokenizer that has more token ids than the model's embedding. encode() throws Error for
/// a text with a token id that the embedding lacks.
class LimitedTokenizer final : public data::Tokenizer {
 public:
  LimitedTokenizer(data::TokenizerPtr all, std::int64_t limit)
      : all_(std::move(all)), limit_(limit) {}

  std::int64_t vocabulary() const override { return limit_; }
  std::vector<std::int64_t> encode(std::string_view text) const override {
    return checked(all_->encode(text));
  }
  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    return all_->decode(tokens);
  }
  std::vector<std::int64_t> begin_tokens() const override { return checked(all_->begin_tokens()); }
  std::vector<std::int64_t> end_tokens() const override { return checked(all_->end_tokens()); }
  std::optional<bool> begins_texts() const override { return all_->begins_texts(); }

 private:
  std::vector<std::int64_t> checked(std::vector<std::int64_t> ids) const {
    for (const std::int64_t id : ids) {
      TESSERA_CHECK(id < limit_, "the tokenizer has ", all_->vocabulary(),
                    " tokens, but the model's vocabulary is ", limit_,
                    ", and the text has the token ", id,
                    "; pass the tokenizer that the model was trained with");
    }
    return ids;
  }

  data::TokenizerPtr all_;
  std::int64_t limit_;
};

}  // namespace

std::string tokenizer_file(const std::string& file, const std::filesystem::path& folder) {
  const std::filesystem::path path = file.empty() ? folder : std::filesystem::path(file);
  std::error_code error;  // an error is ignored, because opening the file reports it
  if (!std::filesystem::is_directory(path, error)) {
    return file;
  }
  // Returns the path unchanged if the folder has no tokenizer: opening the path then throws Error.
  return data::find_tokenizer(path).value_or(file);
}

/// A model with 256 token ids is assumed to use bytes as token ids. In other models, byte values
/// would be the ids of unrelated tokens.
data::TokenizerPtr open_tokenizer(const std::string& file, const std::filesystem::path& folder,
                                  const LlamaConfig& config, bool new_to_text) {
  const std::string found = tokenizer_file(file, folder);
  TESSERA_CHECK(
      !found.empty() || new_to_text || config.vocab_size == 256,
      "no tokenizer was passed, and the model folder has no tokenizer.json or "
      "tokenizer.model; reading bytes needs a vocabulary of 256, but the model's vocabulary is ",
      config.vocab_size, "; pass the tokenizer of the model or of the tokens");
  data::TokenizerPtr tokenizer =
      found.empty() ? data::byte_tokenizer() : data::open_tokenizer(found);
  return tokenizer->vocabulary() <= config.vocab_size
             ? tokenizer
             : std::make_shared<LimitedTokenizer>(std::move(tokenizer), config.vocab_size);
}

/// generation_config.json overrides config.json, because config.json is often older in chat models.
SpecialTokens read_special_tokens(const std::filesystem::path& folder, const LlamaConfig& config) {
  const std::string of_model = (folder / "config.json").string();
  const std::filesystem::path file = folder / "generation_config.json";
  const std::string of_generation = file.string();
  const nlohmann::json model = parse_object(config.json, of_model);
  const nlohmann::json generation =
      std::filesystem::exists(file)
          ? parse_object(
                files::read_file(file, "a Hugging Face generation_config.json", kMaxConfigBytes),
                of_generation)
          : nlohmann::json::object();
  const auto tokens = [&](const char* key) {
    const ConfigReader reader(generation, of_generation);
    return (reader.has(key) ? reader : ConfigReader(model, of_model))
        .tokens(key, config.vocab_size);
  };
  const std::vector<std::int64_t> begin =
      config.begins_texts ? tokens("bos_token_id") : std::vector<std::int64_t>{};
  TESSERA_CHECK(begin.size() <= 1, folder.string(), ": \"bos_token_id\" has ", begin.size(),
                " tokens; set one token only");
  return {begin, tokens("eos_token_id")};
}

std::vector<std::int64_t> document_end(const data::Tokenizer* tokenizer,
                                       const SpecialTokens& special) {
  std::vector<std::int64_t> end =
      tokenizer != nullptr ? tokenizer->end_tokens() : std::vector<std::int64_t>{};
  if (end.empty() && !special.end.empty()) {
    end = {special.end.front()};
  }
  return end;
}

std::vector<std::int64_t> text_begin(const data::Tokenizer& tokenizer,
                                     const SpecialTokens& special) {
  const std::optional<bool> begins = tokenizer.begins_texts();
  if (!begins) {
    return special.begin;
  }
  return *begins ? tokenizer.begin_tokens() : std::vector<std::int64_t>{};
}

}  // namespace tessera::models
