// Tests loading of Hugging Face folders: values, other programs' names, indices, symbolic links.

#include "checkpoint/known_model.h"
#include "checkpoint/model_folder.h"
#include "faults/system_calls.h"
#include "safetensors_bytes.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/nn/initialization.h"
#include "testing/module_values.h"

namespace tessera::checkpoint {
namespace {

TEST(LoadHuggingFace, FillsPlainModulesAndModelsOnMeta) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  Net plain;
  load_hugging_face(plain, folder.path());
  ExpectEqual(LocalValues(plain), Values());
  const auto net = testing::made_on_meta<Net>();
  EXPECT_ERROR(load_hugging_face(*net, folder.path()), "nn::to_empty()");
  nn::to_empty(*net, at::kCPU);
  EXPECT_ERROR(nn::check_initialized(*net), "4 parameters or buffers");
  load_hugging_face(*net, folder.path());
  nn::check_initialized(*net);
  ExpectEqual(LocalValues(*net), Values());
  plain.head->slot("weight")->role.gathered = true;
  EXPECT_ERROR(load_hugging_face(plain, folder.path()), "'head.weight' is gathered");
}

TEST(LoadHuggingFace, FillsEachRanksSlices) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  RunRanks(4, [&](Rank& rank) {
    for (const auto& sizes : {std::vector<std::int64_t>{2, 2}, {4, 1}, {1, 4}}) {
      const auto mesh = rank.mesh(sizes, {"dp", "tp"});
      Net loaded, expected;
      Distribute(loaded, mesh, Zeros());
      Distribute(expected, mesh, Values());
      load_hugging_face(loaded, folder.path());
      ExpectEqual(LocalValues(loaded), LocalValues(expected));
    }
    // As in FSDP over tensor parallelism, tp splits the weight, and dp splits each tp shard.
    Net net;
    const auto layout = Layout::intern({2, 2}, {{Digit{0, {1, 0}}}, {}});
    const auto whole = distribute_tensor(at::zeros({11, 5}), rank.mesh({2, 2}, {"dp", "tp"}),
                                         {Replicate{}, Replicate{}});
    net.head->slot("weight")->set(whole.redistribute(layout));
    load_hugging_face(net, folder.path());
    EXPECT_TRUE(
        at::equal(full_tensor(net.head->slot("weight")->persistent()), Values().at("head.weight")));
  });
}

TEST(LoadHuggingFace, FailsOnAllRanksIfOneRankCannotRead) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  int reads = 0;
  const auto load = [&](const std::string& fault) {
    const testing::SystemCallFault planted(folder.path(), fault);
    auto errors = ErrorsOfRanks(2, [&](Rank& rank) {
      Net net;
      Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Zeros());
      try {
        load_hugging_face(net, *rank.world(), folder.path());
      } catch (const Error&) {
        for (const auto& [name, slot] : net.named_slots()) {
          EXPECT_FALSE(slot->initialized()) << name;
        }
        throw;
      }
    });
    reads = testing::SystemCallFault::calls("pread");
    return errors;
  };
  EXPECT_EQ(load(""), (std::vector<std::string>{"", ""}));
  // The last pread() reads tensor values: load_hugging_face() reads all headers first.
  for (const auto& error : load("pread:" + std::to_string(reads) + ":EIO")) {
    EXPECT_CONTAINS(error, "model.safetensors", "Input/output error");
  }
}

TEST(LoadHuggingFace, ConvertsFloatingPointTypes) {
  for (const auto type : {at::kBFloat16, at::kHalf, at::kDouble}) {
    TemporaryFolder folder;
    auto stored = Values();
    for (auto& [name, tensor] : stored) {
      tensor = (tensor / 3).to(type);
    }
    auto in_file = stored;
    in_file["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({4});
    WriteModel(folder / "model.safetensors", in_file);
    Net net;
    load_hugging_face(net, folder.path());
    for (auto& [name, tensor] : stored) {
      tensor = tensor.to(at::kFloat);
    }
    ExpectEqual(LocalValues(net), stored);
  }
}

TEST(LoadHuggingFace, AcceptsAnyNameOfTiedParameters) {
  TemporaryFolder folder;
  for (const std::string absent : {"head.weight", "embed.weight"}) {
    auto values = Values();
    const auto kept = values.at(absent == "head.weight" ? "embed.weight" : "head.weight");
    values.erase(absent);
    WriteModel(folder / "model.safetensors", values);
    Net net(/*tied=*/true);
    load_hugging_face(net, folder.path());
    EXPECT_TRUE(at::equal(*net.embed->weight, kept));
    EXPECT_TRUE(at::equal(*net.head->weight, kept));
  }
}

TEST(LoadHuggingFace, RefusesDifferentValuesOfTiedParameters) {
  TemporaryFolder folder;
  auto values = Values();
  const auto load = [&] {
    WriteModel(folder / "model.safetensors", values);
    RunRanks(4, [&](Rank& rank) {
      Net net(/*tied=*/true);
      Distribute(net, rank.mesh({4, 1}, {"dp", "tp"}), Zeros());
      load_hugging_face(net, *rank.world(), folder.path());
      EXPECT_TRUE(at::equal(DistributedTensor(net.head->slot("weight")->persistent()).full_tensor(),
                            values.at("embed.weight")));
    });
  };
  // Some programs save a tied parameter under both of its names.
  values["head.weight"] = values.at("embed.weight").to(at::kDouble);
  load();
  values["head.weight"][10][4] += 1;
  EXPECT_ERROR(load(), "'embed.weight' and 'head.weight' have different values in '",
               "but are one parameter of the model", "\"tie_word_embeddings\": false");
}

/// Expects an Error with the text `part` from load_hugging_face(), and an unchanged model.
void ExpectRefused(const std::filesystem::path& folder, const std::string& part) {
  Net net;
  for (const auto& [name, slot] : net.named_slots()) {
    slot->set(at::zeros_like(slot->get()));
  }
  EXPECT_ERROR(load_hugging_face(net, folder), part);
  ExpectEqual(LocalValues(net), Zeros());
}

TEST(LoadHuggingFace, ListsMissingUnexpectedAndDifferentTensors) {
  TemporaryFolder folder;
  auto values = Values();
  values["extra"] = at::ones({1});
  values.erase("middle.bias");
  WriteModel(folder / "model.safetensors", values);
  ExpectRefused(folder.path(), "missing: middle.bias; unexpected: extra");
  values = Values();
  values["middle.bias"] = at::ones({8});
  values["middle.weight"] = at::ones({7, 5}, at::kLong);
  values["head.weight"] = at::ones({11, 5}).to(at::kFloat8_e4m3fn);
  WriteModel(folder / "model.safetensors", values);
  for (const char* part :
       {"middle.bias (file [8], model [7])", "middle.weight (file I64, model Float)",
        "head.weight (file F8_E4M3, model Float)"}) {
    ExpectRefused(folder.path(), part);
  }
}

/// Returns the values of a Net under the names of timm's ViT, and a tensor that a Net lacks.
Tensors ForeignValues() {
  Tensors foreign;
  foreign["visual.patch_embed.proj.weight"] = Values().at("embed.weight");
  foreign["visual.blocks.0.mlp.fc1.weight"] = Values().at("middle.weight");
  foreign["visual.blocks.0.mlp.fc1.bias"] = Values().at("middle.bias");
  foreign["visual.head.weight"] = Values().at("head.weight");
  foreign["visual.num_batches_tracked"] = at::zeros({1});
  return foreign;
}

/// Maps a tensor name of ForeignValues() to the name of the same tensor in a Net.
std::string name_in_net(const std::string& tensor) {
  for (const auto& [from, to] : {std::pair{"visual.patch_embed.proj.", "embed."},
                                 {"visual.blocks.0.mlp.fc1.", "middle."},
                                 {"visual.head.", "head."}}) {
    if (tensor.starts_with(from)) {
      return to + tensor.substr(std::string(from).size());
    }
  }
  return tensor == "visual.num_batches_tracked" ? "" : tensor;
}

TEST(LoadHuggingFaceNames, MapTensorNamesToParameters) {
  TemporaryFolder folder;
  Tensors foreign = ForeignValues();
  WriteModel(folder / "model.safetensors", foreign);
  Net net, same;
  EXPECT_ERROR(load_hugging_face(net, folder.path()), "model_name");
  load_hugging_face(net, folder.path(), name_in_net);
  ExpectEqual(LocalValues(net), Values());
  foreign.erase("visual.head.weight");
  WriteModel(folder / "model.safetensors", foreign);
  Net tied(/*tied=*/true);
  load_hugging_face(tied, folder.path(), name_in_net);
  EXPECT_TRUE(tied.head->weight->equal(Values().at("embed.weight")));
  WriteModel(folder / "model.safetensors", Values());
  load_hugging_face(same, folder.path(), name_in_net);
  ExpectEqual(LocalValues(same), Values());
}

TEST(LoadHuggingFaceNames, RefuseDuplicateAndUnknownNames) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", ForeignValues());
  Net net;
  EXPECT_ERROR(load_hugging_face(net, folder.path(), [](const auto&) { return "embed.weight"; }),
               "'visual.blocks.0.mlp.fc1.bias' and 'visual.blocks.0.mlp.fc1.weight'",
               "'embed.weight'");
  EXPECT_ERROR(load_hugging_face(net, folder.path(),
                                 [](const std::string& tensor) {
                                   return tensor.ends_with("head.weight") ? "top.weight"
                                                                          : name_in_net(tensor);
                                 }),
               "missing: head.weight", "unexpected: top.weight (visual.head.weight in the file)");
}

TEST(LoadHuggingFace, NamesTheConverterForTorchCheckpoints) {
  TemporaryFolder folder;
  WriteFile(folder / ".metadata", "pickle");
  WriteFile(folder / "__0_0.distcp", "pickle");
  Net net;
  EXPECT_ERROR(load_hugging_face(net, folder.path()), "torch.distributed.checkpoint",
               "from_torch_checkpoint.py");
}

using testing::Entry;
using testing::SafetensorsBytes;

class ModelFilesTest : public ::testing::Test {
 protected:
  void Shard(const std::string& file, const std::string& tensor) {
    WriteFile(folder_ / file,
              SafetensorsBytes("{" + Entry("\"U8\"", "[4]", "[0,4]", tensor) + "}", "abcd"));
  }
  void Index(const std::string& weight_map) {
    WriteFile(folder_ / kIndexFile, "{\"weight_map\":{" + weight_map + "}}");
  }
  void Refuses(const std::string& part) { EXPECT_ERROR(ModelFiles(folder_.path()), part); }

  TemporaryFolder folder_;
  const std::string two_ = R"("a":"1.safetensors","b":"2.safetensors")";
};

TEST_F(ModelFilesTest, OpensASingleFileOrTheShardsOfAnIndex) {
  Shard(kSingleFile, "a");
  const ModelFiles single(folder_.path());
  ASSERT_EQ(single.tensors().size(), 1u);
  EXPECT_EQ(single.tensors().at("a")->read("a").numel(), 4);
  std::filesystem::remove(folder_ / kSingleFile);
  Shard("1.safetensors", "a");
  Shard("2.safetensors", "b");
  Index(two_);
  const ModelFiles files(folder_.path());
  ASSERT_EQ(files.tensors().size(), 2u);
  EXPECT_EQ(files.tensors().at("b")->path().filename(), "2.safetensors");
}

// Incomplete downloads leave links to missing files in Hugging Face's cache folder.
TEST_F(ModelFilesTest, NamesABrokenLink) {
  for (const std::string name : {kSingleFile, kIndexFile, "1.safetensors"}) {
    const TemporaryFolder folder;
    if (name == "1.safetensors") {
      WriteFile(folder / kIndexFile, R"({"weight_map": {"a": "1.safetensors"}})");
    }
    std::filesystem::create_symlink("../../blobs/gone", folder / name);
    EXPECT_ERROR(ModelFiles(folder.path()), name, "../../blobs/gone");
  }
}

TEST_F(ModelFilesTest, RefusesFoldersWithoutModelFiles) {
  EXPECT_ERROR(ModelFiles(folder_ / "missing"), "there is no model folder");
  Refuses("has neither model.safetensors nor model.safetensors.index.json");
  WriteFile(folder_ / kSingleFile, "version https://git-lfs.github.com/spec/v1\noid sha256:" +
                                       std::string(64, 'a') + "\nsize 123456789\n");
  Refuses("git lfs pull");
  Shard(kSingleFile, "a");
  WriteFile(folder_ / kAdapterConfig, "{}");
  Refuses("has adapter_config.json");
}

TEST_F(ModelFilesTest, RefusesInvalidShardNamesAndLinks) {
  for (const std::string bad : {"/etc/passwd", "..", ".", "", "a\\\\1.safetensors",
                                "1\\n.safetensors", "1\\u202e.safetensors"}) {
    Index("\"a\":\"" + bad + "\"");
    Refuses("is not the name of a file in this folder");
  }
  Index(R"("a":"1\n.safetensors")");
  Refuses(R"(the shard name "1\n.safetensors")");
  Shard("1.safetensors", "a");
  Index(R"("a":"1.safetensors","b\nc":"1.safetensors")");
  Refuses("a tensor's name has a control character");
  const TemporaryFolder elsewhere;
  std::filesystem::rename(folder_ / "1.safetensors", elsewhere / "real");
  std::filesystem::create_symlink(elsewhere / "real", folder_ / "1.safetensors");
  Index(R"("a":"1.safetensors")");
  Refuses("is a symbolic link");
}

TEST_F(ModelFilesTest, FollowsLinksOfAHuggingFaceCache) {
  const auto snapshot = folder_ / "snapshots/0123";
  std::filesystem::create_directories(snapshot);
  std::filesystem::create_directories(folder_ / "blobs");
  Shard("blobs/4567", "a");
  WriteFile(snapshot / kIndexFile, R"({"weight_map":{"a":"1.safetensors"}})");
  std::filesystem::create_symlink("../../blobs/4567", snapshot / "1.safetensors");
  EXPECT_EQ(ModelFiles(snapshot).tensors().size(), 1u);
  std::filesystem::rename(folder_ / "blobs", folder_ / "other");
  std::filesystem::remove(snapshot / "1.safetensors");
  std::filesystem::create_symlink("../../other/4567", snapshot / "1.safetensors");
  EXPECT_ERROR(ModelFiles(snapshot), "is a symbolic link");
}

TEST_F(ModelFilesTest, RefusesShardsThatContradictTheIndex) {
  Shard("1.safetensors", "a");
  Index(two_);
  Refuses("2.safetensors': No such file");
  Index(R"("a":"1.safetensors","b":"1.safetensors")");
  Refuses("has no tensor 'b'");
  Shard("2.safetensors", "c");
  Index(two_);
  Refuses("does not list it");
}

TEST_F(ModelFilesTest, ReadsADuplicateTensorFromTheIndexedShard) {
  Shard("1.safetensors", "a");
  WriteFile(folder_ / "2.safetensors",
            SafetensorsBytes("{" + Entry("\"U8\"", "[4]", "[0,4]", "a") + "," +
                                 Entry("\"U8\"", "[4]", "[4,8]", "b") + "}",
                             "efghijkl"));
  for (const char* shard : {"1.safetensors", "2.safetensors"}) {
    Index(R"("b":"2.safetensors","a":")" + std::string(shard) + "\"");
    EXPECT_EQ(ModelFiles(folder_.path()).tensors().at("a")->path().filename(), shard);
  }
}

TEST_F(ModelFilesTest, RefusesDamagedIndexes) {
  for (const auto& [text, part] : std::vector<std::pair<std::string, const char*>>{
           {"{", "bad JSON"},
           {"{}", "object weight_map"},
           {R"({"weight_map":[]})", "object weight_map"},
           {R"({"weight_map":{"a":1}})", "no file name for \"a\""}}) {
    WriteFile(folder_ / kIndexFile, text);
    Refuses(part);
  }
  std::filesystem::remove(folder_ / kIndexFile);
  std::filesystem::create_directory(folder_ / kIndexFile);
  Refuses("not a regular file");
}

}  // namespace
}  // namespace tessera::checkpoint
