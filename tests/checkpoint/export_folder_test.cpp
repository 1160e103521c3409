#include "checkpoint/export_folder.h"

#include <optional>

#include "checkpoint/model_files.h"
#include "faults/system_calls.h"
#include "known_model.h"
#include "testing/files.h"
#include "testing/survives.h"

namespace tessera::checkpoint {
namespace {

using testing::SystemCallFault;
using testing::TemporaryFolder;
using testing::WriteFile;

constexpr std::int64_t kThreeShards = 250;
constexpr std::int64_t kTwoShards = 400;
constexpr std::int64_t kOneFile = 1 << 20;

/// Exports the known model with `add` added to every value.
void export_model(const std::filesystem::path& folder, std::int64_t max_shard_bytes, int add) {
  std::vector<SafetensorsWriter::Item> items;
  for (const auto& [name, tensor] : Values()) {
    items.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  ExportFolder files(folder, items, "{}", max_shard_bytes);
  for (const auto& [name, tensor] : Values()) {
    files.write(name, std::vector<std::int64_t>(static_cast<std::size_t>(tensor.dim()), 0),
                tensor + add);
  }
  files.publish();
}

/// What was added, if it is the same for every value; nullopt for a mixture.
std::optional<int> added(const ModelFiles& files) {
  std::optional<int> all;
  for (const auto& [name, tensor] : Values()) {
    const at::Tensor difference = files.tensors().at(name)->read(name) - tensor;
    const int add = difference.flatten()[0].item<int>();
    if (!at::equal(difference, at::full_like(difference, add)) || all.value_or(add) != add) {
      return std::nullopt;
    }
    all = add;
  }
  return all;
}

class ReExport : public ::testing::TestWithParam<std::pair<std::int64_t, std::int64_t>> {};

TEST_P(ReExport, KilledAnywhereLeavesTheOlderModelOrTheNewOne) {
  const std::int64_t older = GetParam().first;
  const std::int64_t newer = GetParam().second;
  int calls = 0;
  int found_new = 0;
  for (bool ended = false; !ended; ++calls) {
    const TemporaryFolder folder;
    export_model(folder.path(), older, 1);
    ended = testing::survives([&] {
      const SystemCallFault fault(folder.path(), "any:" + std::to_string(calls + 1) + ":kill");
      export_model(folder.path(), newer, 2);
    });
    const auto found = added(ModelFiles(folder.path()));
    ASSERT_TRUE(found == 1 || found == 2) << "a mixture, killed at call " << calls + 1;
    found_new += *found == 2 ? 1 : 0;
    // Nothing of the killed export stays for long.
    export_model(folder.path(), kOneFile, 3);
    EXPECT_EQ(folder.files(), (std::vector<std::string>{"config.json", "model.safetensors"}));
  }
  EXPECT_GT(calls, 10);
  EXPECT_GT(found_new, 1);
}

INSTANTIATE_TEST_SUITE_P(Shards, ReExport,
                         ::testing::Values(std::pair(kOneFile, kOneFile),
                                           std::pair(kThreeShards, kThreeShards),
                                           std::pair(kOneFile, kTwoShards),
                                           std::pair(kTwoShards, kOneFile)));

TEST(ExportFolder, NeverTakesTheNameOfAnOlderShard) {
  const TemporaryFolder folder;
  export_model(folder.path(), kThreeShards, 1);
  const ModelFiles older(folder.path());
  export_model(folder.path(), kThreeShards, 2);
  // An index that was read before leads to its own shards, though they have lost their names.
  EXPECT_EQ(added(older), 1);
  EXPECT_EQ(added(ModelFiles(folder.path())), 2);
}

TEST(ExportFolder, RefusesAnotherConfiguration) {
  const TemporaryFolder folder;
  WriteFile(folder / "config.json", R"({"layers": 2, "hidden": 8})");
  check_export_folder(folder.path(), R"({ "hidden": 8, "layers": 2 })", 1);
  EXPECT_ERROR(check_export_folder(folder.path(), R"({"layers": 3, "hidden": 8})", 1),
               "holds a model with another config.json", "export to another folder");
}

TEST(ExportFolder, RefusesAnAdapterBesideAModelAndAModelBesideAnAdapter) {
  const auto check = [](const char* file, const char* config_file) {
    const TemporaryFolder folder;
    WriteFile(folder / file, "{}");
    check_export_folder(folder.path(), "{}", 1, config_file);
  };
  for (const char* file : {kAdapterConfig, kAdapterFile}) {
    EXPECT_ERROR(check(file, "config.json"), std::string("has ") + file + " of an adapter",
                 "export to another folder");
  }
  for (const char* file : {"config.json", "model.safetensors", "model.safetensors.index.json",
                           "model-00001-of-00002.safetensors"}) {
    EXPECT_ERROR(check(file, kAdapterConfig), std::string("has ") + file + " of a model");
  }
  check("notes.txt", "config.json");
  check(kAdapterConfig, kAdapterConfig);
}

TEST(ExportFolder, RefusesADiskWithoutRoom) {
  const TemporaryFolder folder;
  EXPECT_ERROR(check_export_folder(folder / "new/out", "{}", std::int64_t{1} << 60),
               "takes 1152921504606846976 bytes, but the disk has room for");
}

TEST(ExportFolder, WritesTheTypeOfAModelWithALlamasNames) {
  const std::vector<SafetensorsWriter::Item> llama{{kEmbedding, at::kFloat, {1}}};
  EXPECT_EQ(with_model_type("{}", {{"w", at::kFloat, {1}}}), "{}");
  EXPECT_EQ(with_model_type(R"({"model_type":"qwen3"})", llama), R"({"model_type":"qwen3"})");
  const char* other = R"({"architectures":["MyForCausalLM"]})";
  EXPECT_EQ(with_model_type(other, llama), other);
  EXPECT_EQ(with_model_type(R"({"vocab_size": 3})", llama),
            "{\n  \"vocab_size\": 3,\n  \"model_type\": \"llama\"\n}\n");
}

TEST(ExportFolder, WritesTheTypeOfTheWeightsToTheConfiguration) {
  EXPECT_EQ(config_of_weights(R"({"a": 1})", at::kFloat), R"({"a": 1})");
  EXPECT_EQ(config_of_weights(R"({"dtype":"float32"})", at::kFloat), R"({"dtype":"float32"})");
  const auto config = config_of_weights(R"({"b": 1, "torch_dtype": "bfloat16"})", at::kFloat);
  EXPECT_EQ(config, "{\n  \"b\": 1,\n  \"torch_dtype\": \"float32\"\n}\n");
}

TEST(ConfigChange, IsNoneWhereDefaultsAreSpelledOutOrTokensAdded) {
  const std::string plain =
      R"({"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 5e5, "eos_token_id": 2})";
  const std::string rewritten =
      R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
          "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "mlp_bias": false,
          "attention_bias": false, "attention_dropout": 0.0, "hidden_act": "silu",
          "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
          "tie_word_embeddings": false, "pad_token_id": 0, "eos_token_id": [2, 3]})";
  EXPECT_EQ(config_change(plain, rewritten), "");
  EXPECT_EQ(config_change(rewritten, plain), "");
  const auto change = [&](const std::string& more) {
    return config_change(plain, plain.substr(0, plain.size() - 1) + ", " + more + "}");
  };
  EXPECT_EQ(change(R"("head_dim": 32)"), "\"head_dim\" is 32 instead of 16");
  EXPECT_EQ(change(R"("attention_bias": true)"), "\"attention_bias\" is true instead of false");
  EXPECT_CONTAINS(change(R"("rope_scaling": {"type": "linear", "factor": 2})"),
                  "\"rope_scaling\" is {\"factor\":2,\"rope_type\":\"linear");
  EXPECT_EQ(change(R"("vocab_size": 3)"), "\"vocab_size\" is 3 instead of null");
}

TEST(ConfigChange, KnowsWindowsThatAreNotUsed) {
  EXPECT_EQ(config_change(R"({"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 2,
                              "use_sliding_window": false})",
                          R"({"model_type": "qwen2", "sliding_window": null,
                              "layer_types": ["full_attention"]})"),
            "");
  EXPECT_EQ(config_change(R"({"model_type": "mistral"})",
                          R"({"model_type": "mistral", "sliding_window": null})"),
            "\"sliding_window\" is null instead of 4096");
}

/// Embedding and head under a Llama's names.
class Tables : public nn::Module<Tables> {
 public:
  class Body : public nn::Module<Body> {
   public:
    Body() { register_module("embed_tokens", std::make_shared<nn::Embedding>(11, 5)); }
  };
  explicit Tables(float last_of_head) {
    register_module("model", std::make_shared<Body>());
    register_module("lm_head", std::make_shared<nn::Linear>(5, 11, nn::LinearOptions{false}));
    for (const auto& [name, slot] : named_slots()) {
      at::Tensor values = at::arange(55, at::kFloat).view({11, 5});
      values[10][4] = name == "lm_head.weight" ? last_of_head : 54;
      slot->set(values);
      slot->set_initialized(true);
    }
  }

}  // namespace
}  // namespace tessera::checkpoint
