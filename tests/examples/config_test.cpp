#include "examples/llama/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "examples/llama/cli.h"
#include "examples/llama/train_options.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace llama {
namespace {

using Json = nlohmann::json;

Json Valid() {
  return {{"vocab_size", 100},
          {"hidden_size", 48},
          {"intermediate_size", 64},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 6}};
}

Config Parse(const Json& json) {
  return parse_config(json.dump(), "config.json");
}

Json With(const char* key, Json value) {
  Json json = Valid();
  json[key] = std::move(value);
  return json;
}

TEST(ParseConfig, FillsWhatHuggingFaceLeavesOut) {
  const Config config = Parse(Valid());
  EXPECT_EQ(config.num_key_value_heads, 6);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_FALSE(config.tie_word_embeddings);
}

TEST(ParseConfig, ReadsRopeThetaInBothPlaces) {
  EXPECT_EQ(Parse(With("rope_theta", 5e5)).rope_theta, 5e5);
  EXPECT_EQ(
      Parse(With("rope_parameters", {{"rope_theta", 7e4}, {"rope_type", "default"}})).rope_theta,
      7e4);
}

TEST(ParseConfig, CountsParameters) {
  const ParameterCount count = count_parameters(Parse(Valid()));
  // 2 * 100 * 48 embedding and head, 3 blocks of 4 * 48 * 48 + 3 * 48 * 64 + 2 * 48, a norm of 48.
  EXPECT_EQ(count.total, 9600 + 3 * (9216 + 9216 + 96) + 48);
  EXPECT_EQ(count.embedding, 4800);
  EXPECT_EQ(count_parameters(Parse(With("tie_word_embeddings", true))).total, count.total - 4800);
}

struct BadConfig {
  const char* key;
  Json value;
  const char* message;
};

TEST(ParseConfig, RefusesWhatItCannotCompute) {
  const BadConfig cases[] = {
      {"hidden_size", 0, "\"hidden_size\" is 0"},
      {"hidden_size", "48", "\"hidden_size\" is \"48\""},
      {"num_hidden_layers", 2.5, "positive integer"},
      {"vocab_size", nullptr, "\"vocab_size\" is missing"},
      {"num_key_value_heads", 4, "not a multiple of num_key_value_heads 4"},
      {"num_attention_heads", 7, "not a multiple of num_attention_heads 7"},
      {"head_dim", 7, "head_dim is 7"},
      {"hidden_act", "gelu", "activations other than silu"},
      {"attention_bias", true, "biases in attention"},
      {"mlp_bias", true, "biases in the MLP"},
      {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "rope scaling"},
      {"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}, "rope scaling"},
      {"model_type", "qwen2", "architectures other than"},
      {"architectures", Json::array({"MistralForCausalLM"}), "architectures other than"},
      {"quantization_config", {{"bits", 4}}, "quantised weights"},
      {"tie_word_embeddings", "yes", "must be true or false"},
      {"rms_norm_eps", -1, "must be a positive number"},
  };
  for (const BadConfig& bad : cases) {
    SCOPED_TRACE(bad.key);
    EXPECT_THAT_ERROR(Parse(With(bad.key, bad.value)), bad.message);
  }
  EXPECT_THAT_ERROR(parse_config("{", "x.json"), "x.json is not a JSON object");
}

TEST(ParseConfig, RefusesHeadsThatTensorParallelismCannotSplit) {
  const Config config = Parse(With("num_key_value_heads", 2));
  check_tensor_parallel(config, 2);
  EXPECT_THAT_ERROR(check_tensor_parallel(config, 4), "num_attention_heads 6");
  EXPECT_THAT_ERROR(check_tensor_parallel(config, 3), "num_key_value_heads 2");
}

TEST(TrainOptions, FlagsWinOverTheConfigFile) {
  const tessera::testing::TemporaryFolder folder;
  const std::string file = (folder.path() / "run.toml").string();
  tessera::testing::WriteFile(
      file, "steps = 7\nlr = 0.25\nsp = false\nconfig = \"c.json\"\ntext = \"t\"\n");
  const TrainOptions options = parse_train_options({"--lr", "0.5", "--config-file", file});
  EXPECT_EQ(options.steps, 7);
  EXPECT_EQ(options.lr, 0.5);
  EXPECT_FALSE(options.sp);
  EXPECT_EQ(options.config, "c.json");
}

TEST(TrainOptions, RefusesWhatContradictsItself) {
  EXPECT_THAT_ERROR(parse_train_options({}), "no model given");
  EXPECT_THAT_ERROR(parse_train_options({"--config", "c"}), "no data given");
  EXPECT_THAT_ERROR(parse_train_options({"--config", "c", "--model", "m"}), "both given");
  EXPECT_THAT_ERROR(parse_train_options({"--config", "c", "--text", "t", "--dp", "3"}),
                    "--batch 4");
  EXPECT_THAT_ERROR(parse_train_options({"--config", "c", "--steps", "x"}), "--steps");
  EXPECT_THAT_ERROR(parse_train_options({"--config", "c", "--lrr", "1"}), "did you mean --lr");
  EXPECT_THAT_ERROR(parse_train_options({"--config", "c", "--text", "t", "--backend", "nccl"}),
                    "--device cuda");
}

TEST(Nearest, FindsTheFewestEdits) {
  EXPECT_EQ(nearest("stpes", {"seq", "steps", "seed"}), "steps");
  EXPECT_EQ(nearest("x", {}), "");
}

}  // namespace
}  // namespace llama
