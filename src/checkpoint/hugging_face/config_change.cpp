// Whether two configurations define the same computation. Programs that rewrite a config.json write
// out the defaults of their classes, and move keys; those of Llama-like models are known here.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tessera/checkpoint/hugging_face.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

bool is_computed_from(const std::string& key) {
  constexpr std::array<std::string_view, 8> kNoComputation = {
      "torch_dtype", "dtype",        "transformers_version", "_name_or_path",
      "use_cache",   "bos_token_id", "eos_token_id",         "pad_token_id"};
  return std::ranges::find(kNoComputation, key) == kNoComputation.end();
}

/// The class of each type, for classes whose defaults are known.
const std::map<std::string, std::string>& known_classes() {
  static const std::map<std::string, std::string> classes{{"llama", "LlamaForCausalLM"},
                                                          {"mistral", "MistralForCausalLM"},
                                                          {"qwen2", "Qwen2ForCausalLM"},
                                                          {"qwen3", "Qwen3ForCausalLM"}};
  return classes;
}

void set_default(json& config, const char* key, const json& value) {
  if (!config.contains(key) || config.at(key).is_null()) {
    config[key] = value;
  }
}

/// Joins the options for positions, which are under two keys.
void join_positions(json& config) {
  json positions = json::object();
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (const auto found = config.find(key); found != config.end()) {
      if (found->is_object()) {
        positions.update(*found);
      }
      config.erase(found);
    }
  }
  set_default(positions, "rope_type", positions.value("type", json("default")));
  positions.erase("type");
  set_default(positions, "rope_theta", config.value("rope_theta", json(10000.0)));
  config["rope_theta"] = positions.at("rope_theta");
  positions.erase("rope_theta");
  config["rope_scaling"] = positions;
}

/// Ignores windows that no layer has.
void join_windows(json& config, const std::string& type) {
  if (type == "mistral" && !config.contains("sliding_window")) {
    config["sliding_window"] = 4096;
  }
  if (type != "mistral" && config.value("use_sliding_window", json()) != true) {
    for (const char* key : {"use_sliding_window", "sliding_window", "max_window_layers"}) {
      config.erase(key);
    }
  }
  const auto layers = config.find("layer_types");
  if (layers != config.end() && layers->is_array() &&
      std::ranges::all_of(*layers, [](const json& layer) { return layer == "full_attention"; })) {
    config.erase(layers);
  }
}

/// Adds the defaults of its class for keys that it leaves out.
json spelled_out(json config) {
  set_default(config, "model_type", "llama");
  const json type = config.at("model_type");
  const auto known =
      type.is_string() ? known_classes().find(type.get<std::string>()) : known_classes().end();
  if (known == known_classes().end()) {
    return config;
  }
  set_default(config, "architectures", json::array({known->second}));
  for (const char* key : {"attention_bias", "mlp_bias", "tie_word_embeddings"}) {
    set_default(config, key, false);
  }
  set_default(config, "attention_dropout", 0);
  set_default(config, "hidden_act", "silu");
  set_default(config, "initializer_range", 0.02);
  set_default(config, "pretraining_tp", 1);
  set_default(config, "rms_norm_eps", 1e-6);
  const json heads = config.value("num_attention_heads", json());
  if (known->first == "llama" || config.contains("num_key_value_heads")) {
    set_default(config, "num_key_value_heads", heads);
  }
  const json hidden = config.value("hidden_size", json());
  if (known->first != "qwen3" && heads.is_number_integer() && hidden.is_number_integer() &&
      heads.get<std::int64_t>() > 0) {
    set_default(config, "head_dim", hidden.get<std::int64_t>() / heads.get<std::int64_t>());
  }
  join_positions(config);
  join_windows(config, known->first);
  return config;
}

}  // namespace

std::string config_change(const std::string& before, const std::string& now) {
  const json one = spelled_out(json::parse(before)), other = spelled_out(json::parse(now));
  json keys = one;
  keys.update(other);
  for (const auto& [key, unused] : keys.items()) {
    const json from = one.value(key, json());
    const json to = other.value(key, json());
    if (from != to && is_computed_from(key)) {
      return fmt::format("\"{}\" is {} instead of {}", key, to.dump(), from.dump());
    }
  }
  return "";
}

}  // namespace tessera::checkpoint
