#include "tessera/checkpoint/hugging_face.h"

#include <chrono>

#include "faults/system_calls.h"
#include "known_model.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/meta_device.h"
#include "testing/files.h"
#include "testing/memory/memory_scope.h"
#include "testing/module_values.h"

namespace tessera::checkpoint {
namespace {

using testing::TemporaryFolder;
using testing::WriteFile;

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
  const auto net = testing::made_on_meta<Net>();
  nn::to_empty(*net, at::kCPU);
  EXPECT_ERROR(nn::check_initialized(*net),
               "the storage of 4 parameters or buffers was never filled");
  load_hugging_face(*net, folder.path());
  nn::check_initialized(*net);
  ExpectEqual(LocalValues(*net), Values());
}

TEST(LoadHuggingFace, ReadsLargeRowsWithinABoundOfMemory) {
  constexpr std::int64_t kMebi = 1 << 20;
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", {{"weight", at::zeros({2, 20 * kMebi})}});
  nn::Linear net(20 * kMebi, 2, nn::LinearOptions{false});
  const testing::MemoryScope memory;
  load_hugging_face(net, folder.path());
  EXPECT_LE(memory.peak(), 4 * 33 * kMebi);
}

TEST(LoadHuggingFace, ReadsByThreadsAtOnce) {
  TemporaryFolder folder;
  Tensors values;
  for (const char* name : {"embed.weight", "head.weight", "middle.weight", "middle.bias"}) {
    values[name] = at::rand({1 << 20});
  }
  WriteModel(folder / "model.safetensors", values);
  Net net;
  for (const auto& [name, slot] : net.named_slots()) {
    slot->set(at::zeros({1 << 20}));
  }
  const testing::SystemCallFault fault(folder.path(), "pread:1:slow");
  const auto begin = std::chrono::steady_clock::now();
  load_hugging_face(net, folder.path());
  const auto took = std::chrono::steady_clock::now() - begin;
  // Each call takes 0.2 s, those of the header one after another.
  EXPECT_LT(took, std::chrono::milliseconds(180) * testing::SystemCallFault::calls("pread"));
  ExpectEqual(LocalValues(net), values);
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

TEST(LoadHuggingFace, FailsOnAllRanksWhereOneCannotRead) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  int reads = 0;
  const auto load = [&](const std::string& fault) {
    const testing::SystemCallFault planted(folder.path(), fault);
    auto errors = testing::ErrorsOfRanks(2, [&](Rank& rank) {
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
  // The last read is long after the headers.
  for (const auto& error : load("pread:" + std::to_string(reads) + ":EIO")) {
    EXPECT_CONTAINS(error, "model.safetensors", "Input/output error");
  }
}

TEST(LoadHuggingFace, FollowsTheOrderOfFsdpOverTensorParallel) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
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
    for (auto& [name, tensor] : stored) {
      tensor = (tensor / 3).to(type);
    }
    WriteModel(folder / "model.safetensors", stored);
    Net net;
    load_hugging_face(net, folder.path());
    for (auto& [name, tensor] : stored) {
      tensor = tensor.to(at::kFloat);
    }
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

TEST(LoadHuggingFace, RefusesTwoValuesOfTiedParameters) {
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
  // The files of programs that save a parameter under both its names.
  values["head.weight"] = values.at("embed.weight").to(at::kDouble);
  load();
  values["head.weight"][10][4] += 1;
  EXPECT_ERROR(load(), "'embed.weight' and 'head.weight' have different values in '",
               "but are one parameter of the model", "\"tie_word_embeddings\": false");
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
  for (const auto& [name, slot] : net.named_slots()) {
    slot->set(at::zeros_like(slot->get()));
  }
  EXPECT_ERROR(load_hugging_face(net, folder), part);
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
  EXPECT_ERROR(load_hugging_face(net, folder.path()), "call nn::to_empty()");
}

TEST(LoadHuggingFace, RefusesGatheredParameters) {
  TemporaryFolder folder;
  WriteModel(folder / "model.safetensors", Values());
  Net net;
  net.head->slot("weight")->set_gathered(true);
  EXPECT_ERROR(load_hugging_face(net, folder.path()), "'head.weight' is gathered");
}

}  // namespace
}  // namespace tessera::checkpoint
