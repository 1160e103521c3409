#include "examples/llama/config.h"

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/core/error.h"

namespace llama {
namespace {

using Json = nlohmann::json;

/// One config.json while it is read: knows its name for messages.
class Reader {
 public:
  Reader(const Json& json, const std::string& origin) : json_(json), origin_(origin) {}

  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }

  std::int64_t positive(const char* key) const {
    TESSERA_CHECK(has(key), origin_, ": \"", key, "\" is missing; a Llama's config.json needs it");
    return checked_positive(key, json_.at(key));
  }

  std::int64_t positive_or(const char* key, std::int64_t otherwise) const {
    return has(key) ? checked_positive(key, json_.at(key)) : otherwise;
  }

  double number_or(const char* key, double otherwise) const {
    if (!has(key)) return otherwise;
    const Json& value = json_.at(key);
    TESSERA_CHECK(value.is_number() && value.get<double>() > 0, origin_, ": \"", key, "\" is ",
                  value.dump(), "; it must be a positive number");
    return value.get<double>();
  }

  bool flag_or(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    const Json& value = json_.at(key);
    TESSERA_CHECK(value.is_boolean(), origin_, ": \"", key, "\" is ", value.dump(),
                  "; it must be true or false");
    return value.get<bool>();
  }

  /// Throws unless `key` is absent, null or one of the values that mean "as Llama does it".
  void only(const char* key, std::initializer_list<Json> allowed, const char* feature) const {
    if (!has(key)) return;
    for (const Json& value : allowed) {
      if (json_.at(key) == value) return;
    }
    tessera::fail(origin_, ": \"", key, "\" is ", json_.at(key).dump(), ", but ", feature,
                  " not implemented; use a model without it");
  }

  const Json& at(const char* key) const { return json_.at(key); }
  const std::string& origin() const { return origin_; }

 private:
  std::int64_t checked_positive(const char* key, const Json& value) const {
    TESSERA_CHECK(value.is_number_integer() && value.get<std::int64_t>() > 0 &&
                      value.get<std::int64_t>() < (std::int64_t{1} << 31),
                  origin_, ": \"", key, "\" is ", value.dump(), "; it must be a positive integer");
    return value.get<std::int64_t>();
  }

  const Json& json_;
  const std::string& origin_;
};

void refuse_unimplemented(const Reader& reader) {
  reader.only("model_type", {"llama"}, "architectures other than \"llama\" are");
  reader.only("architectures", {Json::array({"LlamaForCausalLM"})},
              "architectures other than LlamaForCausalLM are");
  reader.only("hidden_act", {"silu", "swish"}, "activations other than silu are");
  reader.only("attention_bias", {false}, "biases in attention are");
  reader.only("mlp_bias", {false}, "biases in the MLP are");
  reader.only("attention_dropout", {0, 0.0}, "attention dropout is");
  reader.only("pretraining_tp", {1}, "pretraining_tp is");
  reader.only("partial_rotary_factor", {1, 1.0}, "partial rotary embedding is");
  reader.only("quantization_config", {}, "quantised weights are");
  reader.only("sliding_window", {}, "sliding-window attention is");
}

/// rope_theta stands at the top, or (newer files) in rope_parameters; scaling in either spelling.
double read_rope_theta(const Reader& reader) {
  double theta = reader.number_or("rope_theta", 10000.0);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!reader.has(key)) continue;
    const Json& rope = reader.at(key);
    TESSERA_CHECK(rope.is_object(), reader.origin(), ": \"", key, "\" is ", rope.dump(),
                  "; it must be an object or null");
    const Reader inner(rope, reader.origin());
    const char* type = inner.has("rope_type") ? "rope_type" : "type";
    inner.only(type, {"default"}, "rope scaling is");
    inner.only("factor", {1, 1.0}, "rope scaling is");
    inner.only("partial_rotary_factor", {1, 1.0}, "partial rotary embedding is");
    theta = inner.number_or("rope_theta", theta);
  }
  return theta;
}

void check_heads(const Config& c, const std::string& origin) {
  TESSERA_CHECK(c.num_attention_heads % c.num_key_value_heads == 0, origin,
                ": num_attention_heads ", c.num_attention_heads,
                " is not a multiple of num_key_value_heads ", c.num_key_value_heads);
  TESSERA_CHECK(c.head_dim % 2 == 0, origin, ": head_dim is ", c.head_dim,
                "; rotary embedding needs an even one");
}

}  // namespace

Config parse_config(const std::string& text, const std::string& origin) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  TESSERA_CHECK(json.is_object(), origin,
                " is not a JSON object; expected a Hugging Face config.json");
  const Reader reader(json, origin);
  refuse_unimplemented(reader);
  Config c;
  c.vocab_size = reader.positive("vocab_size");
  c.hidden_size = reader.positive("hidden_size");
  c.intermediate_size = reader.positive("intermediate_size");
  c.num_hidden_layers = reader.positive("num_hidden_layers");
  c.num_attention_heads = reader.positive("num_attention_heads");
  c.num_key_value_heads = reader.positive_or("num_key_value_heads", c.num_attention_heads);
  if (!reader.has("head_dim")) {
    TESSERA_CHECK(c.hidden_size % c.num_attention_heads == 0, origin, ": hidden_size ",
                  c.hidden_size, " is not a multiple of num_attention_heads ",
                  c.num_attention_heads, " and no head_dim is given");
  }
  c.head_dim = reader.positive_or("head_dim", c.hidden_size / c.num_attention_heads);
  c.rms_norm_eps = reader.number_or("rms_norm_eps", c.rms_norm_eps);
  c.rope_theta = read_rope_theta(reader);
  c.initializer_range = reader.number_or("initializer_range", c.initializer_range);
  c.tie_word_embeddings = reader.flag_or("tie_word_embeddings", false);
  c.json = text;
  check_heads(c, origin);
  return c;
}

Config read_config(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  TESSERA_CHECK(in && std::filesystem::is_regular_file(file), "can't read the model configuration ",
                file.string(), "; name a Hugging Face config.json");
  std::stringstream text;
  text << in.rdbuf();
  return parse_config(text.str(), file.string());
}

void check_tensor_parallel(const Config& config, std::int64_t tp) {
  const std::array<std::pair<const char*, std::int64_t>, 2> counts{
      {{"num_attention_heads", config.num_attention_heads},
       {"num_key_value_heads", config.num_key_value_heads}}};
  for (const auto& [name, heads] : counts) {
    TESSERA_CHECK(heads % tp == 0, name, " ", heads, " can't be split over --tp ", tp,
                  "; choose a tensor-parallel degree that divides ", config.num_attention_heads,
                  " heads and ", config.num_key_value_heads, " key-value heads");
  }
}

ParameterCount count_parameters(const Config& c) {
  const std::int64_t embedding = c.vocab_size * c.hidden_size;
  const std::int64_t heads = c.num_attention_heads + c.num_key_value_heads;
  const std::int64_t attention = 2 * c.hidden_size * heads * c.head_dim;
  const std::int64_t mlp = 3 * c.hidden_size * c.intermediate_size;
  const std::int64_t block = attention + mlp + 2 * c.hidden_size;
  const std::int64_t head = c.tie_word_embeddings ? 0 : embedding;
  return {embedding + c.num_hidden_layers * block + c.hidden_size + head, embedding};
}

}  // namespace llama
