#include "tessera/checkpoint/hugging_face.h"

#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>

#include "known_model.h"
#include "tessera/nn/initialization.h"
#include "testing/files.h"
#include "testing/forwarding_communicator.h"
#include "testing/wrapped_world.h"

namespace tessera::checkpoint {
namespace {

using Names = std::vector<std::string>;
using testing::ReadFile;
using testing::TemporaryFolder;
using testing::WriteFile;

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
    if (expected.empty()) {
      expected = bytes;
    }
    EXPECT_EQ(bytes, expected);
    EXPECT_EQ(folder.files(), (Names{"config.json", "model.safetensors"}));
  }
}

TEST(SaveHuggingFace, WritesFp32) {
  TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    Net net;
    auto values = Values();
    for (auto& [name, tensor] : values) {
      tensor = tensor.to(at::kBFloat16);
    }
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), values);
    save_hugging_face(net, *rank.world(), folder.path(), "{}");
  });
  for (const auto& [name, tensor] : ReadModel(folder / "model.safetensors")) {
    EXPECT_EQ(tensor.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(tensor, Values().at(name).to(at::kBFloat16).to(at::kFloat)));
  }
}

TEST(SaveHuggingFace, KeepsFp64AndSaysSo) {
  TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    Net net;
    auto values = Values();
    for (auto& [name, tensor] : values) {
      tensor = tensor.to(at::kDouble).add(1e-12);
    }
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), values);
    save_hugging_face(net, *rank.world(), folder.path(), R"({"torch_dtype": "bfloat16"})");
  });
  for (const auto& [name, tensor] : ReadModel(folder / "model.safetensors")) {
    EXPECT_TRUE(at::equal(tensor, Values().at(name).to(at::kDouble).add(1e-12))) << name;
  }
  EXPECT_CONTAINS(ReadFile(folder / "config.json"), R"("torch_dtype": "float64")");
}

TEST(SaveHuggingFace, WritesTheTypeThatIsAskedForAndSaysSo) {
  TemporaryFolder folder;
  const auto save_as = [&](const char* name, const std::string& config, c10::ScalarType dtype) {
    RunRanks(4, [&](Rank& rank) {
      Net net;
      Distribute(net, rank.mesh({2, 2}, {"dp", "tp"}), Values());
      save_hugging_face(net, *rank.world(), folder / name, config, dtype);
    });
  };
  save_as("bf16", "{}", at::kBFloat16);
  for (const auto& [name, tensor] : ReadModel(folder / "bf16/model.safetensors")) {
    EXPECT_TRUE(at::equal(tensor, Values().at(name).to(at::kBFloat16))) << name;
  }
  EXPECT_CONTAINS(ReadFile(folder / "bf16/config.json"), R"("torch_dtype": "bfloat16")");
  save_as("fp16", R"({"dtype": "float32"})", at::kHalf);
  EXPECT_EQ(nlohmann::json::parse(ReadFile(folder / "fp16/config.json")),
            (nlohmann::json{{"dtype", "float16"}}));
  save_as("fp32", "{}", at::kFloat);
  EXPECT_EQ(ReadFile(folder / "fp32/config.json"), "{}");
  EXPECT_ERROR(save_as("int", "{}", at::kInt), "can't be exported as Int: choose Float");
}

TEST(SaveHuggingFace, RefusesValuesThatFp16DoesNotHave) {
  TemporaryFolder folder;
  std::map<std::string, at::Tensor> values = Values();
  values.begin()->second = values.begin()->second + 1e6;
  RunRanks(2, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), values);
    EXPECT_ERROR(save_hugging_face(net, *rank.world(), folder / "out", "{}", at::kHalf),
                 "beyond 65504, the largest of fp16");
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "out/model.safetensors"));
}

TEST(SaveHuggingFace, RefusesParametersThatDifferBetweenRanks) {
  TemporaryFolder folder;
  RunOnMesh({2, 1}, {"ep", "tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Net net;
    Distribute(net, mesh, Values());
    net.middle->slot("weight")->set_distinct_along(mesh["ep"]);
    EXPECT_ERROR(save_hugging_face(net, *rank.world(), folder.path(), "{}"),
                 "parameter 'middle.weight' has other values on each rank", "experts");
  });
  EXPECT_TRUE(folder.files().empty());
}

/// A group in which one collective fails in a chosen way.
class FailingGather final : public testing::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  comm::WorkPtr all_to_all(const at::Tensor&, const at::Tensor&, std::span<const std::int64_t>,
                           std::span<const std::int64_t>) override {
    throw std::runtime_error("out of memory");
  }
};

TEST(SaveHuggingFace, EndsOnAllRanksWhereOneFailsWhileGathering) {
  TemporaryFolder folder;
  const auto errors = testing::ErrorsOfRanks(2, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 1}, {"dp", "tp"}), Values());
    testing::WrappedWorld world(rank.world(), [&](comm::CommunicatorPtr group, const auto&) {
      return rank.rank() == 1 ? std::make_shared<FailingGather>(std::move(group)) : group;
    });
    // The program continues: the peer does not learn it from the program's end.
    EXPECT_THROWN(std::exception, save_hugging_face(net, world, folder.path(), "{}"),
                  rank.rank() == 1 ? "out of memory" : "rank 1");
  });
  EXPECT_TRUE(folder.files().empty());
}

TEST(SaveHuggingFace, SplitsIntoShardsWithAnIndex) {
  TemporaryFolder folder;
  RunRanks(4, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 2}, {"dp", "tp"}), Values());
    save_hugging_face(net, *rank.world(), folder.path(), "{}", {}, 250);
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
      save_hugging_face(net, *rank.world(), folder.path(), "{}", {}, limit);
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
  EXPECT_CONTAINS(errors, "cannot export to '", "file is not a folder");
}

TEST(SaveHuggingFace, TellsAllRanksThatOneCannotTakePart) {
  TemporaryFolder folder;
  const auto errors = testing::ErrorsOfRanks(4, [&](Rank& rank) {
    Net net;
    Distribute(net, rank.mesh({2, 2}, {"dp", "tp"}), Values());
    if (rank.rank() == 2) {
      net.middle->slot("bias")->set_initialized(false);
    }
    save_hugging_face(net, *rank.world(), folder.path(), "{}");
  });
  EXPECT_CONTAINS(errors, "'middle.bias' was never filled");
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
  EXPECT_CONTAINS(errors, "cannot put in place");
  EXPECT_EQ(folder.files(), Names{"model.safetensors"});
}

}  // namespace
}  // namespace tessera::checkpoint
