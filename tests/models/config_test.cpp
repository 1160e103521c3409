#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "tessera/models/llama_config.h"
#include "tessera/models/tokenizer.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::models {
namespace {

using Json = nlohmann::json;

Json Valid() {
  return {{"vocab_size", 100},
          {"hidden_size", 48},
          {"intermediate_size", 64},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 6}};
}

LlamaConfig Parse(const Json& json) {
  return detail::parse_config(json.dump(), "config.json");
}

Json With(const char* key, Json value) {
  Json json = Valid();
  json[key] = std::move(value);
  return json;
}

TEST(ParseConfig, FillsInDefaultsAndReadsRopeTheta) {
  const LlamaConfig config = Parse(Valid());
  EXPECT_EQ(config.num_key_value_heads, 6);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.rope.theta, 10000.0);
  EXPECT_FALSE(config.tie_word_embeddings);
  for (const char* type : {"llama", "mistral", "qwen2"}) {
    Json json = With("model_type", type);
    json["num_key_value_heads"] = nullptr;
    EXPECT_EQ(Parse(json).num_key_value_heads, 6) << type;
  }
  EXPECT_EQ(Parse(With("rope_theta", 5e5)).rope.theta, 5e5);
  EXPECT_EQ(
      Parse(With("rope_parameters", {{"rope_theta", 7e4}, {"rope_type", "default"}})).rope.theta,
      7e4);
}

TEST(ParseConfig, RefusesContradictoryRopeSettings) {
  const auto with_rope = [](Json scaling, Json parameters) {
    Json json = With("rope_scaling", std::move(scaling));
    json["rope_parameters"] = std::move(parameters);
    json["rope_theta"] = 7e4;
    json["max_position_embeddings"] = 256;
    return Parse(json);
  };
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  Json typed = {{"type", "yarn"}, {"factor", 4.0}, {"rope_theta", 7e4}};
  EXPECT_EQ(with_rope(yarn, typed).rope.scaling.kind, RopeScaling::Kind::kYarn);
  EXPECT_ERROR(with_rope(yarn, {{"rope_type", "default"}, {"rope_theta", 7e4}}),
               "\"rope_scaling\" and \"rope_parameters\" set different rotary embeddings");
  EXPECT_ERROR(with_rope(nullptr, {{"rope_type", "default"}, {"rope_theta", 8e4}}),
               "\"rope_theta\" is 70000, but \"rope_parameters\" has 80000");
  EXPECT_EQ(with_rope(nullptr, typed).rope.theta, 7e4);
  typed["rope_type"] = "linear";
  EXPECT_ERROR(with_rope(typed, nullptr),
               "rope scaling has \"rope_type\" \"linear\" and \"type\" \"yarn\"");
}

TEST(ParseConfig, RefusesContradictoryOriginalPositions) {
  const auto with = [](Json scaling, Json original) {
    Json json = With("rope_scaling", std::move(scaling));
    json["max_position_embeddings"] = 256;
    json["original_max_position_embeddings"] = std::move(original);
    return Parse(json);
  };
  Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  EXPECT_EQ(with(yarn, 256).rope.scaling.original_positions, 256);
  EXPECT_ERROR(with(yarn, 64), "\"original_max_position_embeddings\" is 64, but the rope scaling",
               "has 256; remove the wrong value");
  yarn["original_max_position_embeddings"] = 64;
  EXPECT_EQ(with(yarn, 64).rope.scaling.original_positions, 64);
  EXPECT_ERROR(with(yarn, 128), "is 128, but the rope scaling has 64");
  EXPECT_EQ(with({{"rope_type", "linear"}, {"factor", 4.0}}, 64).rope.scaling.factor, 4.0);
  // As in transformers, "truncate": null means false.
  EXPECT_TRUE(with(yarn, 64).rope.scaling.truncate);
  yarn["truncate"] = nullptr;
  EXPECT_FALSE(with(yarn, 64).rope.scaling.truncate);
  yarn["mscale"] = 0.8;
  EXPECT_ERROR(with(yarn, 64), "mscale of YaRN is not implemented");
}

TEST(ParseConfig, ComparesLayerTypesWithTheSlidingWindow) {
  Json json = With("model_type", "mistral");
  json["num_key_value_heads"] = nullptr;
  json["sliding_window"] = 16;
  json["layer_types"] = Json::array({"sliding_attention", "sliding_attention"});
  EXPECT_EQ(Parse(json).sliding_window, 16);
  json["layer_types"] = Json::array({"sliding_attention", "full_attention"});
  EXPECT_ERROR(Parse(json), "\"layer_types\" has \"full_attention\", but the other keys make all");
  json["sliding_window"] = nullptr;
  EXPECT_ERROR(Parse(json), "\"layer_types\" has \"sliding_attention\"");
  json["layer_types"] = Json::array({"full_attention"});
  EXPECT_EQ(Parse(json).sliding_window, 0);
}

TEST(SpecialTokens, ComeFromTheGenerationConfigIfPresent) {
  const testing::TemporaryFolder dir;
  const auto read = [&](const Json& json) { return read_special_tokens(dir.path(), Parse(json)); };
  EXPECT_TRUE(read(Valid()).begin.empty());
  EXPECT_TRUE(read(Valid()).end.empty());
  Json json = With("bos_token_id", 1);
  json["eos_token_id"] = 2;
  EXPECT_EQ(read(json).begin, std::vector<std::int64_t>{1});
  EXPECT_EQ(read(json).end, std::vector<std::int64_t>{2});
  testing::WriteFile(dir / "generation_config.json", R"({"eos_token_id": [3, 99]})");
  EXPECT_EQ(read(json).begin, std::vector<std::int64_t>{1});
  EXPECT_EQ(read(json).end, (std::vector<std::int64_t>{3, 99}));
  testing::WriteFile(dir / "generation_config.json", R"({"eos_token_id": [3, 100]})");
  EXPECT_ERROR(read(json), "generation_config.json: \"eos_token_id\" is [3,100]",
               "vocabulary size, 100");
  testing::WriteFile(dir / "generation_config.json", "{}");
  EXPECT_ERROR(read(With("bos_token_id", "<s>")), "config.json: \"bos_token_id\" is \"<s>\"");
  EXPECT_ERROR(read(With("bos_token_id", {1, 2})), "\"bos_token_id\" has 2 tokens");
}

TEST(ParseConfig, CountsParameters) {
  const ParameterCount count = count_parameters(Parse(Valid()));
  // Counts: embedding and head 2 * 100 * 48, a block 4 * 48 * 48 + 3 * 48 * 64 + 2 * 48, norm 48.
  EXPECT_EQ(count.total, 9600 + 3 * (9216 + 9216 + 96) + 48);
  EXPECT_EQ(count.embedding, 4800);
  EXPECT_EQ(count_parameters(Parse(With("tie_word_embeddings", true))).total, count.total - 4800);
  // attention_bias adds biases to q, k, v and o. mlp_bias adds biases to gate, up and down.
  EXPECT_EQ(count_parameters(Parse(With("attention_bias", true))).total, count.total + 3 * 4 * 48);
  EXPECT_EQ(count_parameters(Parse(With("mlp_bias", true))).total, count.total + 3 * (2 * 64 + 48));
  Json json = With("model_type", "qwen3");
  json["num_key_value_heads"] = 6;
  EXPECT_ERROR(Parse(json), "\"head_dim\" is missing");
  json["head_dim"] = 8;
  EXPECT_EQ(count_parameters(Parse(json)).total, count.total + 3 * 2 * 8);
  json["model_type"] = "qwen2";
  EXPECT_EQ(count_parameters(Parse(json)).total, count.total + 3 * 3 * 48);
}

struct BadConfig {
  const char* key;
  Json value;
  const char* message;
};

TEST(ParseConfig, RefusesUnsupportedSettings) {
  const BadConfig cases[] = {
      {"hidden_size", 0, "\"hidden_size\" is 0"},
      {"hidden_size", "48", "\"hidden_size\" is \"48\""},
      {"num_hidden_layers", 2.5, "positive integer"},
      {"num_hidden_layers", 20000, "the maximum is 10000"},
      {"vocab_size", nullptr, "\"vocab_size\" is missing"},
      {"num_key_value_heads", 4, "not a multiple of num_key_value_heads 4"},
      {"num_attention_heads", 7, "not a multiple of num_attention_heads 7"},
      {"head_dim", 7, "head_dim is 7"},
      {"hidden_act", "gelu", "activations other than silu"},
      {"is_causal", false, "attention to later tokens is not implemented"},
      {"attention_bias", "yes", "must be true or false"},
      {"rope_scaling", {{"type", "longrope"}, {"factor", 2.0}}, "rope scaling is of type"},
      {"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}, "max_position_embeddings"},
      {"rope_scaling", {{"rope_type", "linear"}}, "\"factor\" is missing"},
      {"use_sliding_window", true, "\"use_sliding_window\" is true"},
      {"rope_scaling", {{"factor", 2}}, "a factor without a type of rope scaling"},
      {"rope_parameters",
       {{"full_attention", {{"rope_type", "yarn"}}}},
       "different rotary embeddings"},
      {"model_type", "gemma", "only llama, mistral, qwen2, qwen3, mixtral"},
      {"model_type", "qwen2", "\"num_key_value_heads\" is missing"},
      {"architectures", Json::array({"MistralForCausalLM"}), "MistralForCausalLM"},
      {"sliding_window", 100, "sliding-window attention of a Llama"},
      {"quantization_config", {{"bits", 4}}, "quantised weights"},
      {"tie_word_embeddings", "yes", "must be true or false"},
      {"rms_norm_eps", -1, "must be a positive number"},
      {"model_type", "mixtral", "\"num_key_value_heads\" is missing"},
  };
  for (const BadConfig& bad : cases) {
    SCOPED_TRACE(bad.key);
    EXPECT_ERROR(Parse(With(bad.key, bad.value)), bad.message);
  }
  EXPECT_ERROR(detail::parse_config("{", "x.json"), "x.json is not a JSON object");
  Json mistral = With("model_type", "mistral");
  mistral["num_key_value_heads"] = 6;
  mistral["attention_bias"] = true;
  EXPECT_ERROR(Parse(mistral), "\"attention_bias\" of a mistral is not implemented");
}

Json WithExperts(const char* type, const char* key = "num_key_value_heads", Json value = 3) {
  Json json = With("model_type", type);
  json["num_key_value_heads"] = 3;
  json["head_dim"] = 10;
  json[type == std::string("mixtral") ? "num_local_experts" : "num_experts"] = 8;
  json["num_experts_per_tok"] = 2;
  json["moe_intermediate_size"] = 20;
  json[key] = std::move(value);
  return json;
}

TEST(ParseConfig, ReadsExperts) {
  const LlamaConfig mixtral = Parse(WithExperts("mixtral", "rope_theta", nullptr));
  EXPECT_EQ(mixtral.moe_intermediate_size, 64);
  EXPECT_TRUE(mixtral.norm_topk_prob);
  // In `transformers` the default values depend on the model type.
  EXPECT_EQ(mixtral.rope.theta, 1e6);
  EXPECT_EQ(mixtral.rms_norm_eps, 1e-5);
  EXPECT_EQ(mixtral.sliding_window, 0);
  EXPECT_EQ(Parse(WithExperts("mixtral", "sliding_window", 16)).sliding_window, 16);
  const LlamaConfig olmoe = Parse(WithExperts("olmoe", "output_router_logits", true));
  EXPECT_EQ(olmoe.rms_norm_eps, 1e-5);
  EXPECT_EQ(olmoe.rope.theta, 1e4);
  EXPECT_EQ(olmoe.router_aux_loss_coef, 0.01);
  EXPECT_FALSE(olmoe.norm_topk_prob);
  const LlamaConfig qwen = Parse(WithExperts("qwen3_moe", "mlp_only_layers", {2}));
  EXPECT_EQ(qwen.moe_intermediate_size, 20);
  EXPECT_EQ(qwen.rms_norm_eps, 1e-6);
  EXPECT_EQ(qwen.router_aux_loss_coef, 0);
  EXPECT_EQ(qwen.dense_layers, std::vector<std::int64_t>{2});
  EXPECT_EQ(Parse(WithExperts("qwen3_moe", "decoder_sparse_step", 2)).dense_layers,
            (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(Parse(WithExperts("qwen3_moe", "decoder_sparse_step", 4)).num_experts, 0);
  // Embedding, head and last norm: 2 * 100 * 48 + 48. Each block: attention 2 * 48 * 9 * 10, norms
  // 2 * 48, QK-norms 2 * 10 (Qwen) or 9 * 10 (OLMoE), router 48 * 8 (Qwen's block 2: no router).
  const std::int64_t shared = 9600 + 3 * (8640 + 96) + 48;
  const ParameterCount of_mixtral = count_parameters(mixtral);
  EXPECT_EQ(of_mixtral.total, shared + 3 * (384 + 8 * 3 * 48 * 64));
  EXPECT_EQ(of_mixtral.active, shared + 3 * (384 + 2 * 3 * 48 * 64));
  EXPECT_EQ(count_parameters(olmoe).total, of_mixtral.total + 3 * 90);
  EXPECT_EQ(count_parameters(qwen).total, shared + 3 * 20 + 9216 + 2 * (384 + 8 * 3 * 48 * 20));
  EXPECT_EQ(count_parameters(qwen).active, shared + 3 * 20 + 9216 + 2 * (384 + 2 * 3 * 48 * 20));
  check_tensor_parallel(olmoe, 3);
  check_tensor_parallel(qwen, 6);
  EXPECT_ERROR(check_tensor_parallel(olmoe, 6), "num_key_value_heads 3",
               "with a norm over all heads; choose a degree that divides 3");
}

TEST(ParseConfig, RefusesUnsupportedExpertSettings) {
  const struct {
    const char *type, *key;
    Json value;
    const char* message;
  } cases[] = {
      {"mixtral", "num_experts_per_tok", 9,
       "\"num_experts_per_tok\" is 9, but there are 8 experts"},
      {"mixtral", "num_experts_per_tok", nullptr, "\"num_experts_per_tok\" is missing"},
      {"mixtral", "num_local_experts", nullptr, "\"num_local_experts\" is missing"},
      {"mixtral", "router_jitter_noise", 0.1, "noise in the router is not implemented"},
      {"mixtral", "attention_bias", true, "\"attention_bias\" of a mixtral is not implemented"},
      {"qwen3_moe", "num_experts", 0, "\"num_experts\" is 0"},
      {"qwen3_moe", "moe_intermediate_size", nullptr, "\"moe_intermediate_size\" is missing"},
      {"qwen3_moe", "mlp_only_layers", {"1"}, "\"mlp_only_layers\" is [\"1\"]"},
      {"qwen3_moe", "mlp_only_layers", 1, "\"mlp_only_layers\" is 1"},
      {"qwen3_moe", "norm_topk_prob", 1, "must be true or false"},
      {"qwen3_moe", "use_sliding_window", true, "\"use_sliding_window\" is true"},
      {"olmoe", "clip_qkv", 8.0, "clipped queries, keys and values are not implemented"},
      {"olmoe", "num_experts", 1.5, "positive integer"},
  };
  for (const auto& bad : cases) {
    SCOPED_TRACE(bad.key);
    EXPECT_ERROR(Parse(WithExperts(bad.type, bad.key, bad.value)), bad.message);
  }
}

TEST(Tokenizer, IsReadFromTheModelFolderOrReadsBytes) {
  const LlamaConfig bytes = Parse(With("vocab_size", 256));
  const LlamaConfig pieces = Parse(With("vocab_size", 32000));
  EXPECT_EQ(open_tokenizer("", "", bytes, /*new_to_text=*/false)->vocabulary(), 256);
  EXPECT_EQ(open_tokenizer("", "", pieces, /*new_to_text=*/true)->vocabulary(), 256);
  EXPECT_ERROR(open_tokenizer("", "", pieces, /*new_to_text=*/false),
               "the model's vocabulary is 32000", "pass the tokenizer");
  const auto few = open_tokenizer("", "", Parse(With("vocab_size", 100)), /*new_to_text=*/true);
  EXPECT_EQ(few->encode("AB"), (std::vector<std::int64_t>{65, 66}));
  EXPECT_ERROR(
      few->encode("Abd"),
      "the tokenizer has 256 tokens, but the model's vocabulary is 100, and the text has the "
      "token 100; pass the tokenizer");
  const testing::TemporaryFolder folder;
  EXPECT_ERROR(open_tokenizer("", folder.path(), pieces, /*new_to_text=*/false),
               "has no tokenizer.json or tokenizer.model");
  testing::WriteFile(folder / "tokenizer.json",
                     R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})");
  EXPECT_EQ(open_tokenizer("", folder.path(), pieces, /*new_to_text=*/false)->vocabulary(), 2);
  EXPECT_ERROR(open_tokenizer(folder / "none", folder.path(), pieces, /*new_to_text=*/false),
               "none");
}

TEST(Config, OfAnUntrustedFileIsReadWithinLimits) {
  const testing::TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_ERROR(read_config(folder / "fifo"), "is not a regular file");
  testing::WriteFile(folder / "large", "");
  std::filesystem::resize_file(folder / "large", std::uintmax_t{1} << 40);
  EXPECT_ERROR(read_config(folder / "large"), "at most 10000000");
  const std::string deep = R"({"rope_scaling":)" + std::string(1'000'000, '[');
  EXPECT_ERROR(detail::parse_config(deep, "x.json"), "nested deeper than 16 levels");
}

TEST(ParseConfig, SplitsHeadsOverRanksAndCopiesFewKeyValueHeads) {
  const LlamaConfig config = Parse(With("num_key_value_heads", 2));
  check_tensor_parallel(config, 2);
  EXPECT_ERROR(check_tensor_parallel(config, 4), "num_attention_heads 6");
  EXPECT_ERROR(check_tensor_parallel(config, 3), "num_key_value_heads 2");
  check_tensor_parallel(config, 6);
  EXPECT_EQ(key_value_copies(config, 1), 1);
  EXPECT_EQ(describe_key_value_copies(config, 2), "");
  EXPECT_EQ(describe_key_value_copies(config, 6),
            "key-value heads: 2 on 6 tensor-parallel ranks, each on 3 of them");
}

}  // namespace
}  // namespace tessera::models
