#include <filesystem>

#include "heard_warnings.h"
#include "known_model.h"
#include "sharded/saved_state.h"
#include "tessera/checkpoint/hugging_face.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::ReadFile;
using testing::TemporaryFolder;
using testing::WriteFile;

constexpr const char* kConfig = R"({"model_type": "net", "torch_dtype": "float64"})";

/// Those that SaveStep() saves with `add`, as another type.
Tensors SavedValues(int add, c10::ScalarType dtype) {
  Tensors values;
  for (const auto& [name, tensor] : Values()) {
    values[name] = (tensor + add).to(dtype);
  }
  return values;
}

TEST(ExportStep, WritesTheWeightsOfEveryRankInTheTypeAskedFor) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 3);
  std::uint64_t last = 0;
  for (const auto& [type, name] :
       {std::pair{at::kFloat, "float32"}, {at::kBFloat16, "bfloat16"}, {at::kHalf, "float16"}}) {
    const auto out = dir / name;
    export_hugging_face(dir / "step-00000001", out, kConfig, type,
                        [&](std::uint64_t done, std::uint64_t all) {
                          EXPECT_LE(done, all);
                          last = all;
                        });
    ExpectEqual(ReadModel(out / "model.safetensors"), SavedValues(3, type));
    EXPECT_CONTAINS(ReadFile(out / "config.json"), std::string("\"torch_dtype\": \"") + name);
  }
  EXPECT_EQ(last, 152U * 4);  // the optimizer's state is not counted
}

TEST(ExportStep, RefusesValuesThatFp16DoesNotHave) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1000000);
  EXPECT_ERROR(export_hugging_face(dir / "step-00000001", dir / "out", "{}", at::kHalf),
               "beyond 65504, the largest of fp16; export as bf16");
  EXPECT_FALSE(std::filesystem::exists(dir / "out/model.safetensors"));
}

TEST(ExportStep, IsLoadedAndReplacesAnOlderExport) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  SaveStep(dir.path(), 2, 2);
  for (const int step : {1, 2}) {
    export_hugging_face(dir / ("step-0000000" + std::to_string(step)), dir / "out", "{}",
                        at::kFloat, {}, {}, /*max_shard_bytes=*/250);
    Net net;
    load_hugging_face(net, dir / "out");
    ExpectEqual(LocalValues(net), SavedValues(step, at::kFloat));
  }
}

TEST(ExportStep, CopiesWhatIsBesideTheWeightsOrChangesNothing) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  std::filesystem::create_directories(dir / "model/additional_chat_templates");
  for (const char* name : {"tokenizer.json", "chat_template.jinja",
                           "additional_chat_templates/tools.jinja", "notes.txt"}) {
    WriteFile(dir / "model" / name, name);
  }
  const auto export_to = [&](const char* out, const std::string& config) {
    export_hugging_face(dir / "step-00000001", dir / out, config, at::kFloat, {},
                        files_beside_weights(dir / "model"));
  };
  export_to("out", "{}");
  EXPECT_EQ(ReadFile(dir / "out/additional_chat_templates/tools.jinja"),
            "additional_chat_templates/tools.jinja");
  EXPECT_FALSE(std::filesystem::exists(dir / "out/notes.txt"));
  // Refused for its configuration, it has copied nothing.
  WriteFile(dir / "model/vocab.json", "{}");
  EXPECT_ERROR(export_to("out", R"({"vocab_size": 3})"), "another config.json");
  EXPECT_FALSE(std::filesystem::exists(dir / "out/vocab.json"));
  std::filesystem::remove(dir / "model/chat_template.jinja");
  EXPECT_ERROR(export_to("out", "{}"), "has chat_template.jinja, which the model that is exported");
  std::filesystem::create_symlink("nowhere", dir / "model/merges.txt");
  EXPECT_ERROR(export_to("new", "{}"),
               "merges.txt' is a symbolic link to a file that is not there");
  EXPECT_FALSE(std::filesystem::exists(dir / "new"));
}

TEST(ExportStep, RefusesTheConfigurationOfAnotherModel) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    SavedState state(rank, {1, 1});
    StateDict dict = state.dict();
    dict.entries["model"] = {{"vocab_size", 256}, {"dtype", "float32"}};
    save(*rank.world(), dir.path(), 1, dict, {});
  });
  EXPECT_ERROR(export_hugging_face(dir / "step-00000001", dir / "out", R"({"vocab_size": 300})"),
               "\"vocab_size\" is 300 instead of 256");
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
  export_hugging_face(dir / "step-00000001", dir / "out",
                      R"({"vocab_size": 256, "dtype": "bfloat16"})");
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
};

TEST(ExportStep, RefusesAHeadThatReadersWouldDrop) {
  const TemporaryFolder dir;
  const std::string tied = R"({"tie_word_embeddings": true})";
  RunRanks(1, [&](Rank& rank) {
    Tables same(54), other(55);
    save(*rank.world(), dir.path(), 1, StateDict{same}, {});
    save(*rank.world(), dir.path(), 2, StateDict{other}, {});
    EXPECT_ERROR(save_hugging_face(other, *rank.world(), dir / "saved", tied),
                 "the model has 'model.embed_tokens.weight' and 'lm_head.weight', but its "
                 "config.json says \"tie_word_embeddings\": true");
  });
  export_hugging_face(dir / "step-00000001", dir / "out", tied);
  EXPECT_ERROR(export_hugging_face(dir / "step-00000002", dir / "new", tied),
               "'model.embed_tokens.weight' and 'lm_head.weight' of the checkpoint",
               "have different values");
  EXPECT_FALSE(std::filesystem::exists(dir / "new"));
  export_hugging_face(dir / "step-00000002", dir / "new", R"({"tie_word_embeddings": false})");
}

/// One parameter.
struct TiedTables : nn::Module<TiedTables> {
  TiedTables() {
    auto model = std::make_shared<Tables::Body>();
    auto head = std::make_shared<nn::Linear>(5, 11, nn::LinearOptions{false});
    register_module("model", model);
    register_module("lm_head", head);
    const nn::SlotPtr slot = named_slots().front().second;
    head->tie_slot("weight", slot);
    slot->set(at::ones({11, 5}));
    slot->set_initialized(true);
  }
};

TEST(ExportStep, RefusesToLeaveOutAHeadThatReadersExpect) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    TiedTables tied;
    save(*rank.world(), dir.path(), 1, StateDict{tied}, {});
    for (const char* config : {R"({"tie_word_embeddings": false})", R"({"vocab_size": 11})"}) {
      EXPECT_ERROR(save_hugging_face(tied, *rank.world(), dir / "new", config),
                   "'model.embed_tokens.weight' and 'lm_head.weight' are one parameter",
                   "say true there");
      EXPECT_ERROR(check_save_hugging_face(tied, dir / "new", config), "say true there");
      EXPECT_ERROR(export_hugging_face(dir / "step-00000001", dir / "new", config),
                   "'model.embed_tokens.weight' and 'lm_head.weight' of the checkpoint",
                   "are one tensor", "say true there");
    }
  });
  EXPECT_FALSE(std::filesystem::exists(dir / "new"));
  // The default of another class is not known.
  export_hugging_face(dir / "step-00000001", dir / "out", R"({"model_type": "gemma"})");
}

/// A module whose name is a prefix of the names of an optimizer's state.
struct Learned : nn::Module<Learned> {
  struct Part : nn::Module<Part> {
    nn::Child<nn::Linear> state{*this, "state", 2, 3};
  };
  nn::Child<Part> optimizer{*this, "optimizer"};
};

TEST(ExportStep, WritesTheWeightsOfAModuleThatIsCalledOptimizer) {
  const TemporaryFolder dir;
  Tensors saved;
  RunRanks(1, [&](Rank& rank) {
    Learned model;
    for (const auto& [name, slot] : model.named_slots()) {
      slot->set(at::rand_like(slot->get()));
      slot->set_initialized(true);
    }
    saved = LocalValues(model);
    save(*rank.world(), dir.path(), 1,
         {model, {{"optimizer.state.weight.exp_avg", at::ones({3, 2})}}});
  });
  export_hugging_face(dir / "step-00000001", dir / "out", "{}");
  ASSERT_TRUE(saved.contains("optimizer.state.weight"));
  ExpectEqual(ReadModel(dir / "out/model.safetensors"), saved);
}

TEST(ExportStep, SaysThatAStepHasAveragesToo) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    SavedState state(rank, {1, 1}, 1);
    save(*rank.world(), dir.path(), 1, {state.net, {{"middle.bias.ema", at::zeros({7})}}});
  });
  HeardWarnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    export_hugging_face(dir / "step-00000001", dir / "out", "{}");
  }
  ASSERT_EQ(warnings.texts.size(), 1U);
  EXPECT_CONTAINS(warnings.texts[0], "holds averages of the weights too", "exported as they are");
  ExpectEqual(ReadModel(dir / "out/model.safetensors"), SavedValues(1, at::kFloat));
}

TEST(ExportStep, LeavesTheOlderExportWhereTheStepIsDamaged) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 1);
  export_hugging_face(dir / "step-00000001", dir / "out", "{}");
  SaveStep(dir.path(), 2, 2);
  const auto shard = dir / "step-00000002/shard-00003-model-00001-of-00002.safetensors";
  std::string bytes = ReadFile(shard);
  bytes.back() ^= 1;
  WriteFile(shard, bytes);
  EXPECT_ERROR(export_hugging_face(dir / "step-00000002", dir / "out", "{}"),
               "shard-00003-model-00001", "are not those that were written");
  ExpectEqual(ReadModel(dir / "out/model.safetensors"), SavedValues(1, at::kFloat));
  EXPECT_ERROR(export_hugging_face(dir / "step-00000001", dir / "new", "[]"),
               "is not a JSON object");
  EXPECT_FALSE(std::filesystem::exists(dir / "new"));
}

}  // namespace
}  // namespace tessera::checkpoint
