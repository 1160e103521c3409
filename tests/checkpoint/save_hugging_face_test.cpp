// Tests exports of models and LoRA adapters to empty folders and to folders with a model.

#include <nlohmann/json.hpp>

#include <span>

#include "checkpoint/known_model.h"
#include "checkpoint/model_folder.h"
#include "faults/system_calls.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/initialization.h"
#include "testing/forwarding_communicator.h"
#include "testing/module_values.h"
#include "testing/processes.h"

namespace tessera::checkpoint {
namespace {

void export_from(const std::vector<std::int64_t>& mesh_sizes, const std::filesystem::path& folder,
                 const Tensors& values = Values(), const std::string& config = "{}",
                 std::optional<c10::ScalarType> dtype = {}, std::int64_t limit = 1 << 20) {
  RunRanks(testing::ranks_of(mesh_sizes), [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh(mesh_sizes, {"dp", "tp"}), values);
    save_hugging_face(net, *rank.world(), folder, config, dtype, limit);
  });
}

TEST(SaveHuggingFace, WritesTheSameBytesOnEveryMesh) {
  TemporaryFolder one;
  RunRanks(1, [&](Rank& rank) {
    Net plain;
    for (const auto& [name, slot] : plain.named_slots()) {
      slot->set(Values().at(name));
    }
    save_hugging_face(plain, *rank.world(), one / "made/out", "{\"a\": 1}\n");
  });
  ExpectEqual(ReadModel(one / "made/out/model.safetensors"), Values());
  EXPECT_EQ(ReadFile(one / "made/out/config.json"), "{\"a\": 1}\n");
  for (const auto& sizes : {std::vector<std::int64_t>{2, 2}, {4, 1}, {1, 4}, {3, 1}}) {
    TemporaryFolder folder;
    export_from(sizes, folder.path());
    EXPECT_EQ(folder.files(), (Names{"config.json", "model.safetensors"}));
    EXPECT_EQ(ReadFile(folder / "model.safetensors"), ReadFile(one / "made/out/model.safetensors"));
  }
}

TEST(SaveHuggingFace, WritesBf16AsFp32AndKeepsFp64) {
  TemporaryFolder folder;
  export_from({2, 1}, folder / "bf16", Values(0, at::kBFloat16));
  for (const auto& [name, tensor] : ReadModel(folder / "bf16/model.safetensors")) {
    EXPECT_EQ(tensor.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(tensor, Values(0, at::kBFloat16).at(name).to(at::kFloat)));
  }
  const Tensors doubles = Values(1e-12, at::kDouble);
  export_from({2, 1}, folder / "fp64", doubles, R"({"torch_dtype": "bfloat16"})");
  ExpectEqual(ReadModel(folder / "fp64/model.safetensors"), doubles);
  EXPECT_CONTAINS(ReadFile(folder / "fp64/config.json"), R"("torch_dtype": "float64")");
}

TEST(SaveHuggingFace, WritesTheRequestedTypeToWeightsAndConfig) {
  TemporaryFolder folder;
  const auto save_as = [&](const char* name, const std::string& config, c10::ScalarType dtype) {
    export_from({2, 2}, folder / name, Values(), config, dtype);
    return ReadFile(folder / name / "config.json");
  };
  EXPECT_CONTAINS(save_as("bf16", "{}", at::kBFloat16), R"("torch_dtype": "bfloat16")");
  ExpectEqual(ReadModel(folder / "bf16/model.safetensors"), Values(0, at::kBFloat16));
  EXPECT_EQ(nlohmann::json::parse(save_as("fp16", R"({"dtype": "float32"})", at::kHalf)),
            (nlohmann::json{{"dtype", "float16"}}));
  EXPECT_EQ(save_as("fp32", "{}", at::kFloat), "{}");
  EXPECT_ERROR(save_as("int", "{}", at::kInt), "Int", "Float");
  EXPECT_ERROR(export_from({2, 1}, folder / "out", Values(1e6), "{}", at::kHalf), "65504", "fp16");
  EXPECT_FALSE(std::filesystem::exists(folder / "out/model.safetensors"));
}

TEST(SaveHuggingFace, WritesTiedParametersOnce) {
  TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    Net net(/*tied=*/true);
    nn::init_weights(net, 0);
    save_hugging_face(net, *rank.world(), folder.path(), "{}");
  });
  EXPECT_FALSE(ReadModel(folder / "model.safetensors").contains("head.weight"));
}

TEST(SaveHuggingFace, RefusesParametersThatDifferBetweenRanks) {
  TemporaryFolder folder;
  RunOnMesh({2, 1}, {"ep", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Net net;
    Distribute(net, mesh, Values());
    net.middle->slot("weight")->set_distinct_along(mesh["ep"]);
    EXPECT_ERROR(save_hugging_face(net, *rank.world(), folder.path(), "{}"),
                 "parameter 'middle.weight'", "experts");
  });
  EXPECT_TRUE(folder.files().empty());
}

/// A process group whose all_to_all() throws.
class FailingGather final : public testing::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  comm::WorkPtr all_to_all(const at::Tensor&, const at::Tensor&, std::span<const std::int64_t>,
                           std::span<const std::int64_t>) override {
    throw std::runtime_error("out of memory");
  }
};

TEST(SaveHuggingFace, FailsOnAllRanksIfOneGatherFails) {
  TemporaryFolder folder;
  const auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Values());
    testing::WrappedWorld world(rank.world(), [&](comm::CommunicatorPtr group, const auto&) {
      return rank.rank() == 1 ? std::make_shared<FailingGather>(std::move(group)) : group;
    });
    // Rank 1 keeps running after its error, so save_hugging_face() must send the error to rank 0.
    EXPECT_THROWN(std::exception, save_hugging_face(net, world, folder.path(), "{}"),
                  rank.rank() == 1 ? "out of memory" : "rank 1");
  });
  EXPECT_TRUE(folder.files().empty());
}

TEST(SaveHuggingFace, SplitsIntoShardsWithAnIndex) {
  TemporaryFolder folder;
  export_from({2, 2}, folder.path(), Values(), "{}", {}, 250);
  EXPECT_EQ(
      folder.files(),
      (Names{"config.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
             "model-00003-of-00003.safetensors", "model.safetensors.index.json"}));
  const auto index = nlohmann::json::parse(ReadFile(folder / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 4 * (55 + 35 + 7 + 55));
  EXPECT_EQ(index["weight_map"]["embed.weight"], "model-00001-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"]["middle.bias"], "model-00002-of-00003.safetensors");
}

TEST(SaveHuggingFace, FailsOnAllRanksForUnfilledParametersAndBadFolders) {
  for (const auto& [out, word] : {std::pair{"file/out", "file is not a folder"},
                                  {"unfilled", "'middle.bias' was never filled"},
                                  {"taken", "cannot put in place"}}) {
    TemporaryFolder folder;
    WriteFile(folder / "file", "");
    std::filesystem::create_directories(folder / "taken/model.safetensors/folder");
    std::filesystem::create_directories(folder / "unfilled");
    const std::string name = out;
    const auto errors = ErrorsOfRanks(4, [&](Rank& rank) {
      Net net;
      Distribute(net, rank.mesh({2, 2}, {"dp", "tp"}), Values());
      if (name == "unfilled" && rank.rank() == 2) {
        net.middle->slot("bias")->set_initialized(false);
      }
      save_hugging_face(net, *rank.world(), folder / name, "{}");
    });
    EXPECT_CONTAINS(errors, word);
    EXPECT_EQ(folder.files().size(), 3u);
    EXPECT_TRUE(FilesIn(folder / "unfilled").empty());
    EXPECT_EQ(FilesIn(folder / "taken"), Names{"model.safetensors"});
  }
}

nn::Sequential two_linears() {
  return nn::Sequential(std::make_shared<nn::Linear>(5, 7), std::make_shared<nn::Linear>(7, 3));
}

TEST(SaveLora, WritesEachMatrixUnderPeftsName) {
  TemporaryFolder folder;
  RunRanks(3, [&](Rank& rank) {
    nn::Sequential model = two_linears();
    nn::apply_lora(model, {.rank = 2, .alpha = 4, .targets = {"1"}, .dropout = 0.5});
    testing::fill(model);
    fsdp::fully_shard(model, rank.mesh({3}, {"dp"}));
    save_lora(model, *rank.world(), folder / "made/here", "models/base");
    const auto saved = ReadModel(folder / "made/here/adapter_model.safetensors");
    ASSERT_EQ(saved.size(), 2u);
    for (const auto& [name, slot] : nn::lora_slots(model)) {
      EXPECT_TRUE(at::equal(saved.at("base_model.model." + name), full_tensor(slot->persistent())));
    }
  });
  const auto config = nlohmann::json::parse(ReadFile(folder / "made/here/adapter_config.json"));
  EXPECT_EQ(config.at("r"), 2);
  EXPECT_EQ(config.at("lora_alpha"), 4);
  EXPECT_EQ(config.at("lora_dropout"), 0.5);
  EXPECT_EQ(config.at("peft_type"), "LORA");
  EXPECT_EQ(config.at("target_modules"), nlohmann::json({"1"}));
  EXPECT_EQ(config.at("base_model_name_or_path"), "models/base");
}

TEST(SaveLora, RefusesAdaptersThatPeftCannotStore) {
  TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    const auto save = [&](nn::ModuleBase& model, const std::string& to = "out") {
      save_lora(model, *rank.world(), folder / to, "base");
    };
    nn::Sequential model = two_linears();
    EXPECT_ERROR(save(model), "no adapters");
    nn::apply_lora(model, {.rank = 2, .targets = {"0"}});
    EXPECT_ERROR(save(model), "0.lora_A.weight", "never filled");
    testing::fill(model);
    EXPECT_ERROR(save_lora(model, *rank.world(), folder / ".", folder.path().string()),
                 "the base model of the adapters");
    save(model);
    nn::apply_lora(model, {.rank = 3, .targets = {"1"}});
    testing::fill(model);
    EXPECT_ERROR(save(model), "'0' and '1'", "differ in rank");
    nn::Sequential other = two_linears();
    nn::apply_lora(other, {.rank = 3, .targets = {"1"}});
    testing::fill(other);
    EXPECT_ERROR(save(other), "a different adapter_config.json");
  });
}

// PEFT has no fused linear layers, so a fused layer's adapter is saved as separate adapters: one
// for each of the layers that the fused layer combines.
TEST(SaveLora, SplitsTheAdapterOfAFusedLinear) {
  TemporaryFolder folder;
  RunRanks(3, [&](Rank& rank) {
    const auto qkv = std::make_shared<nn::FusedLinear>(
        5, std::vector<nn::FusedPart>{{"q", 8}, {"k", 4}}, nn::FusedLinearOptions{.groups = 2});
    nn::Sequential model(qkv, std::make_shared<nn::Linear>(12, 3));
    nn::apply_lora(model, {.rank = 2, .targets = {"0"}});
    testing::fill(model);
    const nn::LoraLinear adapter = nn::lora_linears(model).front();
    const at::Tensor a = adapter.a->get().detach().clone();
    const at::Tensor b = adapter.b->get().detach().clone();
    fsdp::fully_shard(model, rank.mesh({3}, {"dp"}));
    save_lora(model, *rank.world(), folder / "out", "base");
    const auto saved = ReadModel(folder / "out/adapter_model.safetensors");
    ASSERT_EQ(saved.size(), 4u);
    // The outputs are rows of B A. split() splits the last dimension, so B A is transposed first.
    const std::vector<at::Tensor> parts = qkv->split(b.matmul(a).t());
    for (const auto& [name, part] : {std::pair("q", parts[0]), std::pair("k", parts[1])}) {
      const std::string prefix = std::string("base_model.model.") + name;
      EXPECT_TRUE(at::equal(saved.at(prefix + ".lora_A.weight"), a));
      EXPECT_TRUE(at::allclose(saved.at(prefix + ".lora_B.weight").matmul(a), part.t()));
    }
  });
  const auto config = nlohmann::json::parse(ReadFile(folder / "out/adapter_config.json"));
  EXPECT_EQ(config.at("target_modules"), nlohmann::json({"k", "q"}));
}

TEST(SaveLora, MatricesAreNotInTheModelFiles) {
  TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    nn::Sequential plain = two_linears(), adapted = two_linears();
    testing::fill(plain);
    save_hugging_face(plain, *rank.world(), folder / "plain", "{}");
    nn::apply_lora(adapted, {.targets = {"*"}});
    load_hugging_face(adapted, folder / "plain");
    nn::init_unfilled(adapted, 0);
    save_hugging_face(adapted, *rank.world(), folder / "adapted", "{}");
  });
  EXPECT_EQ(ReadFile(folder / "adapted/model.safetensors"),
            ReadFile(folder / "plain/model.safetensors"));
}

using testing::SystemCallFault;

constexpr std::int64_t kThreeShards = 250;
constexpr std::int64_t kTwoShards = 400;
constexpr std::int64_t kOneFile = 1 << 20;

void export_model(const std::filesystem::path& folder, std::int64_t max_shard_bytes, int add) {
  ExportFolder files(folder, ItemsOf(Values()), "{}", max_shard_bytes);
  for (const auto& [name, tensor] : Values()) {
    files.write(name, std::vector<std::int64_t>(static_cast<std::size_t>(tensor.dim()), 0),
                tensor + add);
  }
  files.publish();
}

/// If all tensors in `files` equal Values() + n for one integer n, returns n; otherwise, nullopt.
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

/// Exports with shard size `older`, then `newer`; kills the second export at each system call.
void expect_older_or_newer(std::int64_t older, std::int64_t newer) {
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
    // The next export removes all files that the killed export has left.
    export_model(folder.path(), kOneFile, 3);
    EXPECT_EQ(folder.files(), (Names{"config.json", "model.safetensors"}));
  }
  EXPECT_GT(calls, 10);
  EXPECT_GT(found_new, 1);
}
TEST(ExportFolder, HasTheOldOrNewModelAfterAKilledExport) {
  expect_older_or_newer(kOneFile, kOneFile);
  expect_older_or_newer(kThreeShards, kThreeShards);
  expect_older_or_newer(kOneFile, kTwoShards);
  expect_older_or_newer(kTwoShards, kOneFile);
}

TEST(ExportFolder, DoesNotReuseShardNames) {
  const TemporaryFolder folder;
  export_model(folder.path(), kThreeShards, 1);
  const ModelFiles older(folder.path());
  export_model(folder.path(), kThreeShards, 2);
  // ModelFiles that were opened before the second export can still read the removed shards.
  EXPECT_EQ(added(older), 1);
  EXPECT_EQ(added(ModelFiles(folder.path())), 2);
}

TEST(ExportFolder, RefusesADifferentConfigurationAndAFullDisk) {
  const TemporaryFolder folder;
  WriteFile(folder / "config.json", R"({"layers": 2, "hidden": 8})");
  check_export_folder(folder.path(), R"({ "hidden": 8, "layers": 2 })", 1);
  EXPECT_ERROR(check_export_folder(folder.path(), R"({"layers": 3, "hidden": 8})", 1),
               "a different config.json");
  EXPECT_ERROR(check_export_folder(folder / "new/out", "{}", std::int64_t{1} << 60),
               "1152921504606846976 bytes");
}

TEST(ExportFolder, RefusesToMixAdapterAndModelFiles) {
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

TEST(ExportFolder, WritesTheWeightTypeToTheConfiguration) {
  for (const char* same : {R"({"a": 1})", R"({"dtype":"float32"})"}) {
    EXPECT_EQ(config_of_weights(same, at::kFloat), same);
  }
  EXPECT_EQ(config_of_weights(R"({"b": 1, "torch_dtype": "bfloat16"})", at::kFloat),
            "{\n  \"b\": 1,\n  \"torch_dtype\": \"float32\"\n}\n");
}

TEST(ConfigChange, ReturnsTheFirstKeyThatAffectsTheComputation) {
  const std::string plain = R"({"hidden_size": 64, "eos_token_id": 2, "rope_scaling": null})";
  EXPECT_EQ(config_change(plain, R"({"hidden_size": 64, "eos_token_id": [2, 3], "dtype": "x"})"),
            "");
  EXPECT_EQ(config_change(plain, R"({"hidden_size": 32, "vocab_size": 3})"),
            "\"hidden_size\" is 32 instead of 64");
  EXPECT_EQ(config_change(plain, R"({"hidden_size": 64, "vocab_size": 3})"),
            "\"vocab_size\" is 3 instead of null");
}

}  // namespace
}  // namespace tessera::checkpoint
