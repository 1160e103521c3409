#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "known_model.h"
#include "sharded/saved_state.h"
#include "tessera/checkpoint/hugging_face.h"
#include "testing/errors.h"
#include "testing/files.h"
#include "testing/ranks.h"

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
