#include "tessera/checkpoint/hugging_face.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "safetensors_bytes.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta_device.h"
#include "testing/errors.h"
#include "testing/files.h"
#include "testing/ranks.h"

namespace tessera::checkpoint {
namespace {

using Names = std::vector<std::string>;
using Tensors = std::map<std::string, at::Tensor>;
using testing::ReadFile;
using testing::TemporaryFolder;
using testing::WriteFile;

/// Sizes that neither 2 nor 4 divide.
class Net : public nn::Module<Net> {
 public:
  explicit Net(bool tied = false) {
    embed = register_module("embed", std::make_shared<nn::Embedding>(11, 5));
    middle = register_module("middle", std::make_shared<nn::Linear>(5, 7));
    head = register_module("head", std::make_shared<nn::Linear>(5, 11, nn::LinearOptions{false}));
    if (tied) head->tie_slot("weight", embed->slot("weight"));
  }
  std::shared_ptr<nn::Embedding> embed;
  std::shared_ptr<nn::Linear> middle, head;
};

/// Different numbers for each parameter of a Net.
Tensors Values() {
  return {{"embed.weight", at::arange(55, at::kFloat).view({11, 5})},
          {"middle.weight", at::arange(100, 135, at::kFloat).view({7, 5})},
          {"middle.bias", at::arange(200, 207, at::kFloat)},
          {"head.weight", at::arange(300, 355, at::kFloat).view({11, 5})}};
}

void WriteModel(const std::filesystem::path& path, const Tensors& tensors) {
  std::vector<SafetensorsWriter::Item> items;
  for (const auto& [name, tensor] : tensors) {
    items.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  SafetensorsWriter writer(path, items);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.finish();
}

Tensors ReadModel(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  Tensors tensors;
  for (const auto& [name, entry] : file.tensors()) tensors[name] = file.read(name);
  return tensors;
}

void ExpectEqual(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_TRUE(at::equal(found.at(name), tensor)) << name;
  }
}

/// What a module's parameters are on this rank.
Tensors LocalValues(const nn::ModuleBase& module) {
  Tensors values;
  for (const auto& [name, slot] : module.named_slots()) {
    values[name] = local_tensor(slot->persistent()).detach().clone();
  }
  return values;
}

/// Puts each parameter on the mesh in another way.
void Distribute(Net& net, const DeviceMesh& mesh, const Tensors& values) {
  const std::map<std::string, Placements> placements = {{"embed.weight", {Shard{0}, Shard{0}}},
                                                        {"middle.weight", {Shard{0}, Shard{1}}},
                                                        {"middle.bias", {Shard{0}, Replicate{}}},
                                                        {"head.weight", {Shard{1}, Shard{0}}}};
  for (const auto& [name, slot] : net.named_slots()) {
    slot->set(distribute_tensor(values.at(name), mesh, placements.at(name)));
    slot->set_initialized(true);
  }
}

Tensors Zeros() {
  Tensors zeros;
  for (const auto& [name, tensor] : Values()) zeros[name] = at::zeros_like(tensor);
  return zeros;
}

TEST(LoadHuggingFace, FillsAPlainModule) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  Net net;
  load_hugging_face(net, folder.path());
  ExpectEqual(LocalValues(net), Values());
}

TEST(LoadHuggingFace, FillsWhatWasMadeOnTheMetaDevice) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  std::shared_ptr<Net> net;
  {
    const nn::MetaDevice meta;
    net = std::make_shared<Net>();
  }
  nn::to_empty(*net, at::kCPU);
  EXPECT_THROW(nn::check_initialized(*net), Error);
  load_hugging_face(*net, folder.path());
  nn::check_initialized(*net);
  ExpectEqual(LocalValues(*net), Values());
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
  });
}

TEST(LoadHuggingFace, FollowsTheOrderOfFsdpOverTensorParallel) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  RunRanks(4, [&](Rank& rank) {
    const auto mesh = rank.mesh({2, 2}, {"dp", "tp"});
    Net net;
    const auto layout = Layout::intern({2, 2}, {{Digit{0, {1, 0}}}, {}});
    const auto whole = distribute_tensor(at::zeros({11, 5}), mesh, {Replicate{}, Replicate{}});
    net.head->slot("weight")->set(whole.redistribute(layout));
    load_hugging_face(net, folder.path());
    const auto found = DistributedTensor(net.head->slot("weight")->persistent()).full_tensor();
    EXPECT_TRUE(at::equal(found, Values().at("head.weight")));
  });
}

TEST(LoadHuggingFace, ConvertsFloatingPointTypes) {
  for (const auto type : {at::kBFloat16, at::kHalf, at::kDouble}) {
    TemporaryFolder folder;
    auto stored = Values();
    for (auto& [name, tensor] : stored) tensor = (tensor / 3).to(type);
    WriteModel(folder / "model.safetensors", stored);
    Net net;
    load_hugging_face(net, folder.path());
    for (auto& [name, tensor] : stored) tensor = tensor.to(at::kFloat);
    ExpectEqual(LocalValues(net), stored);
  }
}

TEST(LoadHuggingFace, NeedsOneNameOfTiedParameters) {
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

TEST(LoadHuggingFace, IgnoresTheRotaryBufferOfOldExports) {
  TemporaryFolder folder;
  auto values = Values();
  values["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({4});
  WriteModel(folder / "model.safetensors", values);
  Net net;
  load_hugging_face(net, folder.path());
  ExpectEqual(LocalValues(net), Values());
}

/// Expects that a folder is refused with `part` in the message, and that nothing was changed.
void ExpectRefused(const std::filesystem::path& folder, const std::string& part) {
  Net net;
  for (const auto& [name, slot] : net.named_slots()) slot->set(at::zeros_like(slot->get()));
  EXPECT_THAT_ERROR(load_hugging_face(net, folder), part);
  ExpectEqual(LocalValues(net), Zeros());
}

TEST(LoadHuggingFace, ListsMissingAndUnexpectedTensors) {
  TemporaryFolder folder;
  auto values = Values();
  values["extra"] = at::ones({1});
  values.erase("middle.bias");
  WriteModel(folder / "model.safetensors", values);
  ExpectRefused(folder.path(), "missing: middle.bias; unexpected: extra");
}

TEST(LoadHuggingFace, ListsSizesAndTypesThatDiffer) {
  TemporaryFolder folder;
  auto values = Values();
  values["middle.bias"] = at::ones({8});
  values["middle.weight"] = at::ones({7, 5}, at::kLong);
  values["head.weight"] = at::ones({11, 5}).to(at::kFloat8_e4m3fn);
  WriteModel(folder / "model.safetensors", values);
  ExpectRefused(folder.path(), "middle.bias (file [8], model [7])");
  ExpectRefused(folder.path(), "middle.weight (file I64, model Float)");
  ExpectRefused(folder.path(), "head.weight (file F8_E4M3, model Float)");
}

TEST(LoadHuggingFace, ChangesNothingWhenALaterShardIsTruncated) {
  TemporaryFolder folder;
  auto first = Values(), second = Values();
  first.erase("head.weight");
  second = {{"head.weight", second.at("head.weight")}};
  WriteModel(folder / "1.safetensors", first);
  WriteModel(folder / "2.safetensors", second);
  WriteFile(folder / "model.safetensors.index.json",
            R"({"weight_map":{"embed.weight":"1.safetensors","middle.weight":"1.safetensors",)"
            R"("middle.bias":"1.safetensors","head.weight":"2.safetensors"}})");
  std::filesystem::resize_file(folder / "2.safetensors",
                               std::filesystem::file_size(folder / "2.safetensors") - 1);
  ExpectRefused(folder.path(), "2.safetensors' is not a valid safetensors file");
}

TEST(LoadHuggingFace, RefusesParametersWithoutStorage) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  const nn::MetaDevice meta;
  Net net;
  EXPECT_THAT_ERROR(load_hugging_face(net, folder.path()), "call nn::to_empty()");
}

TEST(LoadHuggingFace, RefusesGatheredParameters) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  Net net;
  net.head->slot("weight")->set_persistent(at::zeros({11, 5}));
  EXPECT_THAT_ERROR(load_hugging_face(net, folder.path()), "'head.weight' is gathered");
}

TEST(SaveHuggingFace, WritesWhatThePlainModuleHolds) {
  TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    Net net;
    WriteModel(folder / "in.safetensors", Values());
    std::filesystem::create_directory(folder / "in");
    std::filesystem::rename(folder / "in.safetensors", folder / "in/model.safetensors");
    load_hugging_face(net, folder / "in");
    save_hugging_face(net, *rank.world(), folder / "made/out", "{\"a\": 1}\n");
  });
  ExpectEqual(ReadModel(folder / "made/out/model.safetensors"), Values());
  EXPECT_EQ(ReadFile(folder / "made/out/config.json"), "{\"a\": 1}\n");
}

TEST(SaveHuggingFace, WritesTheSameBytesOnEveryMesh) {
  std::string expected;
  for (const auto& sizes : {std::vector<std::int64_t>{1, 1}, {2, 2}, {4, 1}, {1, 4}, {3, 1}}) {
    TemporaryFolder folder;
    RunRanks(static_cast<int>(sizes[0] * sizes[1]), [&](Rank& rank) {
      Net net;
      Distribute(net, rank.mesh(sizes, {"dp", "tp"}), Values());
      save_hugging_face(net, *rank.world(), folder.path(), "{}");
    });
    ExpectEqual(ReadModel(folder / "model.safetensors"), Values());
    const auto bytes = ReadFile(folder / "model.safetensors");
    if (expected.empty()) expected = bytes;
    EXPECT_EQ(bytes, expected);
    EXPECT_EQ(folder.files(), (Names{"config.json", "model.safetensors"}));
  }
}

TEST(SaveHuggingFace, WritesFp32) {
  TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    Net net;
    auto values = Values();
    for (auto& [name, tensor] : values) tensor = tensor.to(at::kBFloat16);
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), values);
    save_hugging_face(net, *rank.world(), folder.path(), "{}");
  });
  for (const auto& [name, tensor] : ReadModel(folder / "model.safetensors")) {
    EXPECT_EQ(tensor.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(tensor, Values().at(name).to(at::kBFloat16).to(at::kFloat)));
  }
}

TEST(SaveHuggingFace, SplitsIntoShardsWithAnIndex) {
  TemporaryFolder folder;
  RunRanks(4, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 2}, {"dp", "tp"}), Values());
    save_hugging_face(net, *rank.world(), folder.path(), "{}", 250);
  });
  EXPECT_EQ(
      folder.files(),
      (Names{"config.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
             "model-00003-of-00003.safetensors", "model.safetensors.index.json"}));
  const auto index = nlohmann::json::parse(ReadFile(folder / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 4 * (55 + 35 + 7 + 55));
  EXPECT_EQ(index["weight_map"]["embed.weight"], "model-00001-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"]["middle.bias"], "model-00002-of-00003.safetensors");
  Net net;
  load_hugging_face(net, folder.path());
  ExpectEqual(LocalValues(net), Values());
}

TEST(SaveHuggingFace, ReplacesAnOlderModelOfAnotherShape) {
  TemporaryFolder folder;
  const auto save = [&](std::int64_t limit) {
    RunRanks(2, [&](Rank& rank) {
      Net net;
      Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Values());
      save_hugging_face(net, *rank.world(), folder.path(), "{}", limit);
    });
    Net net;
    load_hugging_face(net, folder.path());
    ExpectEqual(LocalValues(net), Values());
  };
  WriteFile(folder / "tokenizer.model", "kept");
  save(250);
  save(600);
  EXPECT_EQ(folder.files().size(), 2u + 3u);
  save(1 << 20);
  EXPECT_EQ(folder.files(), (Names{"config.json", "model.safetensors", "tokenizer.model"}));
  save(250);
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors"));
}

TEST(SaveHuggingFace, WritesTiedParametersOnce) {
  TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    Net net(/*tied=*/true);
    nn::init_weights(net, 0);
    save_hugging_face(net, *rank.world(), folder.path(), "{}");
  });
  const auto tensors = ReadModel(folder / "model.safetensors");
  EXPECT_TRUE(tensors.contains("embed.weight"));
  EXPECT_FALSE(tensors.contains("head.weight"));
}

TEST(SaveHuggingFace, TellsAllRanksThatRankZeroCannotWrite) {
  TemporaryFolder folder;
  WriteFile(folder / "file", "");
  const auto errors = testing::ErrorsOfRanks(4, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 2}, {"dp", "tp"}), Values());
    save_hugging_face(net, *rank.world(), folder / "file/out", "{}");
  });
  for (const auto& error : errors) EXPECT_NE(error.find("cannot write '"), error.npos) << error;
}

TEST(SaveHuggingFace, TellsAllRanksThatOneCannotTakePart) {
  TemporaryFolder folder;
  const auto errors = testing::ErrorsOfRanks(4, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 2}, {"dp", "tp"}), Values());
    if (rank.rank() == 2) net.middle->slot("bias")->set_initialized(false);
    save_hugging_face(net, *rank.world(), folder.path(), "{}");
  });
  for (const auto& error : errors) {
    EXPECT_NE(error.find("'middle.bias' was never filled"), error.npos) << error;
  }
  EXPECT_TRUE(folder.files().empty());
}

TEST(SaveHuggingFace, TellsAllRanksThatTheFilesCouldNotBePutInPlace) {
  TemporaryFolder folder;
  std::filesystem::create_directories(folder / "model.safetensors/taken");
  const auto errors = testing::ErrorsOfRanks(2, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Values());
    save_hugging_face(net, *rank.world(), folder.path(), "{}");
  });
  for (const auto& error : errors)
    EXPECT_NE(error.find("cannot put in place"), error.npos) << error;
  EXPECT_EQ(folder.files(), Names{"model.safetensors"});
}

}  // namespace
}  // namespace tessera::checkpoint
