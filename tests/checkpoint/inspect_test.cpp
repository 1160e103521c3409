#include "tessera/checkpoint/inspect.h"

#include <cmath>
#include <cstring>
#include <filesystem>

#include "checkpoint/safetensors_bytes.h"
#include "saved_state.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/nn/linear.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::ReadFile;
using testing::TemporaryFolder;
using testing::WriteFile;

constexpr const char* kFirstFile = "shard-00000-model-00001-of-00002.safetensors";

TEST(InspectedStep, IsTheNewestAndSaysWhatItHolds) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  SaveStep(dir.path(), 2);
  EXPECT_EQ(find_step(dir.path()), dir / "step-00000002");
  EXPECT_CONTAINS(describe_step(find_step(dir.path())), R"(step 2 of run "")",
                  "4 ranks on the mesh (2, 2)", "head.weight F32 [11, 5] in 4 chunks",
                  R"({"samples":640})");
}

TEST(InspectedStep, IsVerifiedToTheTensorAndByte) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const auto step = dir / "step-00000001";
  EXPECT_TRUE(verify_step(step).empty());
  std::string bytes = ReadFile(step / kFirstFile);
  bytes.back() ^= 1;
  WriteFile(step / kFirstFile, bytes);
  WriteFile(step / "stray.safetensors", "");
  std::filesystem::remove(step / "shard-00003-model-00001-of-00002.safetensors");
  const auto faults = verify_step(step);
  ASSERT_EQ(faults.size(), 3u);
  EXPECT_CONTAINS(faults[0], "bytes 0 to ", kFirstFile, "'middle.weight' from byte 0");
  EXPECT_CONTAINS(faults[1], "cannot open", "shard-00003-model-00001");
  EXPECT_CONTAINS(faults[2], "stray.safetensors' is not in the manifest");
}

TEST(InspectedStep, ShowsItsEntriesEscaped) {
  const TemporaryFolder dir;
  RunRanks(1, [&](Rank& rank) {
    SavedState state(rank, {1, 1});
    StateDict dict = state.dict();
    dict.entries = {{"note", "\u009b2J\u202e"}};
    save(*rank.world(), dir.path(), 1, dict);
  });
  EXPECT_CONTAINS(describe_step(dir / "step-00000001"), R"({"note":"\u009b2J\u202e"})");
}

TEST(InspectedStep, HasAManifestThatIsNoLink) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1);
  const auto manifest = dir / "step-00000001/manifest.json";
  std::filesystem::rename(manifest, dir / "elsewhere");
  std::filesystem::create_symlink(dir / "elsewhere", manifest);
  EXPECT_ERROR(verify_step(dir / "step-00000001"), "manifest.json' is a symbolic link");
  EXPECT_ERROR(ExpectLoads(dir / "step-00000001", 0), "manifest.json' is a symbolic link");
}

TEST(InspectedStep, IsRefusedByNameForATypeThatLibtorchLacks) {
  const TemporaryFolder dir;
  WriteFile(dir / "shard-00000-model-00001-of-00001.safetensors",
            testing::SafetensorsBytes(
                R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"w\":{\"saved_offsets\":[0]}}"},)" +
                    testing::Entry("\"F4\"", "[4]", "[0,2]") + "}",
                "ab"));
  constexpr const char* kError =
      "tensor 'w' of the checkpoint has the type F4, which libtorch lacks";
  EXPECT_ERROR(compare_steps(dir.path(), dir.path()), kError);
}

/// A model with one buffer, of any type.
class Counted : public nn::Module<Counted> {
 public:
  explicit Counted(const at::Tensor& count) { register_buffer("count", count.clone()); }
};

TEST(ComparedSteps, AreEqualWhateverTheMesh) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 3);
  RunRanks(3, [&](Rank& rank) {
    SavedState state(rank, {3, 1}, 3);
    save(*rank.world(), dir.path(), 2, state.dict());
  });
  EXPECT_EQ(compare_steps(dir / "step-00000001", dir / "step-00000002"),
            std::vector<std::string>{});
}

TEST(ComparedSteps, DifferByNameSizeTypeAndValue) {
  const TemporaryFolder dir;
  const auto weight = [](const std::vector<float>& values) {
    return at::tensor(values).view({3, 2});
  };
  RunRanks(1, [&](Rank& rank) {
    nn::Linear one(2, 3);
    one.slot("weight")->set(weight({1, 2, 4, 0, 5, NAN}));
    one.slot("bias")->set(at::ones({3}));
    save(*rank.world(), dir.path(), 1, {one});
    nn::Linear other(2, 3, nn::LinearOptions{false});
    other.slot("weight")->set(weight({1, 2.5, 3, 0, 5, NAN}).to(at::kBFloat16));
    save(*rank.world(), dir.path(), 2, {other});
    nn::Linear infinite(2, 4);
    infinite.slot("weight")->set(at::ones({4, 2}));
    infinite.slot("bias")->set(at::ones({4}));
    save(*rank.world(), dir.path(), 3, {infinite});
    one.slot("weight")->set(weight({1, 2, 4, 0, 5, 6}));
    save(*rank.world(), dir.path(), 4, {one});
  });
  const auto compare = [&](int a, int b) {
    return compare_steps(dir / ("step-0000000" + std::to_string(a)),
                         dir / ("step-0000000" + std::to_string(b)));
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(compare(1, 2), (Lines{"bias: only in the first",
                                  "weight: F32 and BF16; largest difference 1, relative 0.25"}));
  EXPECT_EQ(compare(2, 1)[0], "bias: only in the second");
  EXPECT_EQ(compare(1, 3), (Lines{"bias: [3] and [4]", "weight: [3, 2] and [4, 2]"}));
  EXPECT_EQ(compare(1, 4), Lines{"weight: largest difference inf, relative inf"});
}

TEST(ComparedSteps, DifferByLargeIntegersAndImaginaryParts) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 60;
  const auto one = at::tensor({kLarge, std::int64_t{-1}}),
             other = at::tensor({kLarge + 3, -kLarge});
  const auto numbers = at::ones({2});
  const auto line = [](const at::Tensor& a, const at::Tensor& b) {
    const TemporaryFolder dir;
    RunRanks(1, [&](Rank& rank) {
      for (const auto& [step, values] : {std::pair{1, a}, {2, b}}) {
        Counted net(values);
        save(*rank.world(), dir.path(), step, {net});
      }
    });
    return compare_steps(dir / "step-00000001", dir / "step-00000002");
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(line(one.narrow(0, 0, 1), other.narrow(0, 0, 1)),
            Lines{"count: largest difference 3, relative 2.60209e-18"});
  EXPECT_EQ(line(one, other), Lines{"count: largest difference 1.15292e+18, relative 1"});
  EXPECT_EQ(line(at::complex(numbers, numbers), at::complex(numbers, numbers * 3)),
            Lines{"count: largest difference 2, relative 0.666667"});
  EXPECT_EQ(line(at::complex(numbers, numbers), at::complex(numbers, numbers)), Lines{});
}

/// Gives a step's shards what PyTorch's writer says in them, and takes its manifest away.
void make_shards_of_others(const std::filesystem::path& step) {
  std::filesystem::remove(step / "manifest.json");
  for (const auto& entry : std::filesystem::directory_iterator(step)) {
    const std::string bytes = ReadFile(entry.path());
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    std::string header = bytes.substr(sizeof(length), length);
    header.insert(header.find("\"format\""), R"("DCP_VERSION":"1.0",)");
    WriteFile(entry.path(),
              testing::SafetensorsBytes(header, bytes.substr(sizeof(length) + length)));
  }
}

TEST(ShardsOfOthers, AreNotThoseOfASaveWhoseManifestIsMissing) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 5);
  std::filesystem::remove(dir / "step-00000001/manifest.json");
  constexpr const char* kError = "has the shards of a step, but no manifest.json";
  EXPECT_ERROR(ExpectLoads(dir / "step-00000001", 5), kError, "copy the whole folder");
}

/// As PyTorch's writer leaves a folder.
TEST(ShardsOfOthers, AreLoadedWithoutAManifest) {
  const TemporaryFolder dir;
  SaveStep(dir.path(), 1, 5);
  make_shards_of_others(dir / "step-00000001");
  EXPECT_EQ(ExpectLoads(dir / "step-00000001", 5), 0);
  EXPECT_ERROR(verify_step(dir / "step-00000001"), "has no checksums to verify");
  // An unfinished save of ours is none.
  WriteFile(dir / "step-00000001/INCOMPLETE", "");
  EXPECT_ERROR(ExpectLoads(dir / "step-00000001", 5), "there is no checkpoint in");
  std::filesystem::remove(dir / "step-00000001/INCOMPLETE");
  std::filesystem::remove(dir / "step-00000001" / kFirstFile);
  EXPECT_ERROR(ExpectLoads(dir / "step-00000001", 5), "are not complete: tensor '", "copy all");
}

}  // namespace
}  // namespace tessera::checkpoint
