// Adapters in PEFT's form. That PEFT itself loads them: tests/examples/models/test_fine_tuning.py.

#include <nlohmann/json.hpp>

#include "known_model.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/fused_linear.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/lora.h"
#include "testing/files.h"
#include "testing/module_values.h"

namespace tessera::checkpoint {
namespace {

using testing::ReadFile;
using testing::TemporaryFolder;

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
      EXPECT_TRUE(at::equal(saved.at("base_model.model." + name),
                            testing::full_tensor(slot->persistent())));
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

TEST(SaveLora, RefusesWhatPeftCannotHold) {
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
                 "the folder of the model");
    testing::WriteFile(folder / "config.json", "{}");
    EXPECT_ERROR(save(model, "."), "has config.json of a model");
    save(model);
    EXPECT_ERROR(save_hugging_face(model, *rank.world(), folder / "out", "{}"), "has adapter_",
                 " of an adapter");
    nn::apply_lora(model, {.rank = 3, .targets = {"1"}});
    testing::fill(model);
    EXPECT_ERROR(save(model), "'0' and '1'", "differ in rank");
    nn::Sequential other = two_linears();
    nn::apply_lora(other, {.rank = 3, .targets = {"1"}});
    testing::fill(other);
    EXPECT_ERROR(save(other), "another adapter_config.json");
  });
}

// As adapters of separate Linears: PEFT has no fused ones.
TEST(SaveLora, WritesThoseOfAFusedLinearForItsParts) {
  TemporaryFolder folder;
  RunRanks(3, [&](Rank& rank) {
    const auto qkv = std::make_shared<nn::FusedLinear>(
        5, std::vector<nn::FusedPart>{{"q", 8}, {"k", 4}}, nn::FusedLinearOptions{.groups = 2});
    nn::Sequential model(qkv, std::make_shared<nn::Linear>(12, 3));
    nn::apply_lora(model, {.rank = 2, .targets = {"0"}});
    testing::fill(model);
    const nn::LoraLinear adapter = nn::lora_linears(model).front();
    const at::Tensor a = adapter.branch->a->weight.slot()->get().detach().clone();
    const at::Tensor b = adapter.branch->b->weight.slot()->get().detach().clone();
    fsdp::fully_shard(model, rank.mesh({3}, {"dp"}));
    save_lora(model, *rank.world(), folder / "out", "base");
    const auto saved = ReadModel(folder / "out/adapter_model.safetensors");
    ASSERT_EQ(saved.size(), 4u);
    // The columns of a result are the rows of the weights.
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

TEST(SaveLora, TheModelsOwnFilesAreWithoutAdapters) {
  TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    nn::Sequential plain = two_linears();
    testing::fill(plain);
    save_hugging_face(plain, *rank.world(), folder / "plain", "{}");
    nn::Sequential adapted = two_linears();
    nn::apply_lora(adapted, {.targets = {"*"}});
    load_hugging_face(adapted, folder / "plain");
    nn::init_unfilled(adapted, 0);
    save_hugging_face(adapted, *rank.world(), folder / "adapted", "{}");
  });
  EXPECT_EQ(ReadFile(folder / "adapted/model.safetensors"),
            ReadFile(folder / "plain/model.safetensors"));
}

}  // namespace
}  // namespace tessera::checkpoint
