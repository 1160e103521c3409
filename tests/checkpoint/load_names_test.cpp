// Weights of other code: pairs of names say what the model calls its tensors.

#include <filesystem>
#include <initializer_list>
#include <string_view>

#include "known_model.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/nn/containers.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::TemporaryFolder;
using testing::WriteFile;

/// The values of a Net under names as timm's ViT has them, and a tensor that the model has not.
Tensors ForeignValues() {
  Tensors foreign;
  foreign["visual.patch_embed.proj.weight"] = Values().at("embed.weight");
  foreign["visual.blocks.0.mlp.fc1.weight"] = Values().at("middle.weight");
  foreign["visual.blocks.0.mlp.fc1.bias"] = Values().at("middle.bias");
  foreign["visual.head.weight"] = Values().at("head.weight");
  foreign["visual.num_batches_tracked"] = at::zeros({1});
  return foreign;
}

HuggingFaceOptions GoodPairs() {
  return {.names = {{"visual.patch_embed.proj.*", "embed.*"},
                    {"visual.blocks.0.mlp.fc1.*", "middle.*"},
                    {"visual.head.*", "head.*"},
                    {"visual.num_batches_tracked", ""}}};
}

void WriteSharded(const std::filesystem::path& folder, const Tensors& tensors) {
  std::string map;
  int shard = 0;
  for (const auto& [name, tensor] : tensors) {
    const std::string file = std::to_string(shard++ % 2) + ".safetensors";
    map += (map.empty() ? "\"" : ", \"") + name + "\": \"" + file + "\"";
  }
  Tensors halves[2];
  shard = 0;
  for (const auto& [name, tensor] : tensors) {
    halves[shard++ % 2][name] = tensor;
  }
  WriteModel(folder / "0.safetensors", halves[0]);
  WriteModel(folder / "1.safetensors", halves[1]);
  WriteFile(folder / "model.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
}

TEST(LoadNames, NamesThePairThatRemovesAPrefix) {
  TemporaryFolder folder;
  Tensors wrapped;
  for (const auto& [name, tensor] : Values()) {
    wrapped["module." + name] = tensor;
  }
  WriteModel(folder / "model.safetensors", wrapped);
  Net net;
  EXPECT_ERROR(load_hugging_face(net, folder.path()), R"({"module.**", "**"})");
  load_hugging_face(net, folder.path(), {.names = {{"module.**", "**"}}});
  ExpectEqual(LocalValues(net), Values());
  WriteModel(folder / "model.safetensors", ForeignValues());
  EXPECT_ERROR(load_hugging_face(net, folder.path()), "HuggingFaceOptions::names");
}

TEST(LoadNames, FillsAModelFromFilesWithOtherNames) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", ForeignValues());
  Net net;
  load_hugging_face(net, folder.path(), GoodPairs());
  ExpectEqual(LocalValues(net), Values());
}

TEST(LoadNames, FillsEachRanksSlicesFromShards) {
  TemporaryFolder folder;
  WriteSharded(folder.path(), ForeignValues());
  RunOnMesh({3}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Net loaded, expected;
    for (Net* net : {&loaded, &expected}) {
      for (const auto& [name, slot] : net->named_slots()) {
        const at::Tensor whole = Values().at(name);
        const at::Tensor values = net == &loaded ? at::zeros_like(whole) : whole;
        slot->set(distribute_tensor(values, mesh, {Shard{0}}).tensor());
      }
    }
    load_hugging_face(loaded, *rank.world(), folder.path(), GoodPairs());
    ExpectEqual(LocalValues(loaded), LocalValues(expected));
  });
}

TEST(LoadNames, FillsATiedParameterByOneOfItsNames) {
  TemporaryFolder folder;
  Tensors foreign = ForeignValues();
  foreign.erase("visual.head.weight");
  WriteModel(folder / "model.safetensors", foreign);
  HuggingFaceOptions pairs = GoodPairs();
  pairs.names.erase(pairs.names.begin() + 2);
  Net net(/*tied=*/true);
  load_hugging_face(net, folder.path(), pairs);
  EXPECT_TRUE(net.head->weight->equal(Values().at("embed.weight")));
}

TEST(LoadNames, LeavesNamesThatNoPairMatches) {
  TemporaryFolder folder;
  Tensors mixed = Values();
  mixed["top.weight"] = mixed.at("head.weight");
  mixed.erase("head.weight");
  WriteModel(folder / "model.safetensors", mixed);
  Net net;
  load_hugging_face(net, folder.path(), {.names = {{"top.*", "head.*"}}});
  ExpectEqual(LocalValues(net), Values());
}

void ExpectRefusal(const HuggingFaceOptions& options,
                   std::initializer_list<std::string_view> parts) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", ForeignValues());
  Net net;
  const std::string message =
      testing::message_of([&] { load_hugging_face(net, folder.path(), options); });
  EXPECT_TRUE(testing::Contains(message, parts)) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
}

TEST(LoadNames, RefusesPairsThatContradictEachOther) {
  HuggingFaceOptions pairs = GoodPairs();
  pairs.names.emplace_back("**.fc1.bias", "**.bias");
  ExpectRefusal(pairs,
                {"{\"visual.blocks.0.mlp.fc1.*\", \"middle.*\"}", "{\"**.fc1.bias\", \"**.bias\"}",
                 "both match the tensor", "'visual.blocks.0.mlp.fc1.bias'"});
}

TEST(LoadNames, RefusesTwoTensorsForOneName) {
  HuggingFaceOptions pairs = GoodPairs();
  pairs.names[2].second = "embed.*";
  ExpectRefusal(pairs, {"'visual.head.weight' and 'visual.patch_embed.proj.weight'",
                        "would both be 'embed.weight'"});
}

TEST(LoadNames, RefusesAPairThatMatchesNothing) {
  HuggingFaceOptions pairs = GoodPairs();
  pairs.names.emplace_back("visual.norm.*", "norm.*");
  ExpectRefusal(pairs, {"{\"visual.norm.*\", \"norm.*\"} matches none of the 5 tensors",
                        "'visual.blocks.0.mlp.fc1.bias'"});
}

TEST(LoadNames, RefusesWildcardsThatDoNotCorrespond) {
  HuggingFaceOptions pairs = GoodPairs();
  pairs.names[1].first = "**.mlp.fc1.*";
  ExpectRefusal(pairs, {"'**.mlp.fc1.*'", "wildcards are not those"});
}

TEST(LoadNames, NamesTheTensorOfTheFileThatTheModelHasNot) {
  HuggingFaceOptions pairs = GoodPairs();
  pairs.names[0].second = "embedding.*";
  ExpectRefusal(pairs, {"missing: embed.weight",
                        "unexpected: embedding.weight (visual.patch_embed.proj.weight there)",
                        "correct the pairs of names"});
}

TEST(LoadNames, FailsOnAllRanksAlike) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", ForeignValues());
  const auto errors = testing::ErrorsOfRanks(2, [&](Rank& rank) {
    Net net;
    HuggingFaceOptions pairs = GoodPairs();
    if (rank.rank() == 1) {
      pairs.names.pop_back();
    }
    load_hugging_face(net, *rank.world(), folder.path(), pairs);
  });
  EXPECT_CONTAINS(errors, "unexpected: visual.num_batches_tracked");
}

TEST(LoadNames, NameTheConverterForATorchCheckpoint) {
  TemporaryFolder folder;
  WriteFile(folder / ".metadata", "pickle");
  WriteFile(folder / "__0_0.distcp", "pickle");
  Net net;
  EXPECT_ERROR(load_hugging_face(net, folder.path()), "torch.distributed.checkpoint",
               "tools/from_torch_checkpoint.py");
}

}  // namespace
}  // namespace tessera::checkpoint
