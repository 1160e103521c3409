#include "checkpoint/model_files.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "safetensors_bytes.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::checkpoint {
namespace {

using testing::Entry;
using testing::SafetensorsBytes;
using testing::TemporaryFolder;
using testing::WriteFile;

class ModelFilesTest : public ::testing::Test {
 protected:
  /// A file with one tensor of four bytes.
  void Shard(const std::string& file, const std::string& tensor) {
    WriteFile(folder_ / file,
              SafetensorsBytes("{" + Entry("\"U8\"", "[4]", "[0,4]", tensor) + "}", "abcd"));
  }
  void Index(const std::string& weight_map, const std::string& metadata = "{\"total_size\":8}") {
    WriteFile(folder_ / kIndexFile,
              "{\"metadata\":" + metadata + ",\"weight_map\":{" + weight_map + "}}");
  }
  void Refuses(const std::string& part) { EXPECT_ERROR(ModelFiles(folder_.path()), part); }

  TemporaryFolder folder_;
  const std::string two_ = R"("a":"1.safetensors","b":"2.safetensors")";
};

TEST_F(ModelFilesTest, OpensASingleFile) {
  Shard(kSingleFile, "a");
  const ModelFiles files(folder_.path());
  ASSERT_EQ(files.tensors().size(), 1u);
  EXPECT_EQ(files.tensors().at("a")->read("a").numel(), 4);
}

TEST_F(ModelFilesTest, OpensTheShardsOfAnIndex) {
  Shard("1.safetensors", "a");
  Shard("2.safetensors", "b");
  Index(two_);
  const ModelFiles files(folder_.path());
  ASSERT_EQ(files.tensors().size(), 2u);
  EXPECT_EQ(files.tensors().at("b")->path().filename(), "2.safetensors");
}

// As an incomplete download leaves in the cache of Hugging Face.
TEST_F(ModelFilesTest, NamesALinkWhoseTargetIsMissing) {
  for (const std::string name : {kSingleFile, kIndexFile, "1.safetensors"}) {
    const TemporaryFolder folder;
    if (name == "1.safetensors") {
      WriteFile(folder / kIndexFile, R"({"weight_map": {"a": "1.safetensors"}})");
    }
    std::filesystem::create_symlink("../../blobs/gone", folder / name);
    EXPECT_ERROR(ModelFiles(folder.path()), name, "../../blobs/gone");
  }
}

TEST_F(ModelFilesTest, NamesAGitLfsPointer) {
  WriteFile(folder_ / kSingleFile, "version https://git-lfs.github.com/spec/v1\noid sha256:" +
                                       std::string(64, 'a') + "\nsize 123456789\n");
  Refuses("git lfs pull");
}

TEST_F(ModelFilesTest, NeedsNoTotalSize) {
  Shard("1.safetensors", "a");
  for (const std::string metadata : {"{}", "null", "{\"total_size\":4.0}"}) {
    Index(R"("a":"1.safetensors")", metadata);
    EXPECT_EQ(ModelFiles(folder_.path()).tensors().size(), 1u);
  }
}

TEST_F(ModelFilesTest, SaysWhatAFolderLacks) {
  EXPECT_ERROR(ModelFiles(folder_ / "missing"), "there is no model folder");
  Refuses("has neither model.safetensors nor model.safetensors.index.json");
}

TEST_F(ModelFilesTest, RefusesAModelWithAnAdapter) {
  Shard(kSingleFile, "a");
  WriteFile(folder_ / kAdapterConfig, "{}");
  Refuses("has adapter_config.json, by which other programs load the adapter");
}

TEST_F(ModelFilesTest, RefusesShardsThatArePaths) {
  for (const std::string bad : {"/etc/passwd", "../1.safetensors", "..", ".", "", "a/1.safetensors",
                                "a\\\\1.safetensors", "1\\u0000.safetensors", "1\\n.safetensors",
                                "1\\u009b.safetensors", "1\\u202e.safetensors"}) {
    Index("\"a\":\"" + bad + "\"");
    Refuses("is not the name of a file in this folder");
  }
  Index(R"("a":"1\n.safetensors")");
  Refuses(R"(its shard "1\n.safetensors")");
}

TEST_F(ModelFilesTest, RefusesNamesThatWouldBreakAMessage) {
  Shard("1.safetensors", "a");
  Index(R"("a":"1.safetensors","b\nc":"1.safetensors")");
  Refuses("a tensor's name has a control character");
}

TEST_F(ModelFilesTest, RefusesALinkOutOfTheFolder) {
  TemporaryFolder elsewhere;
  Shard("real", "a");
  std::filesystem::rename(folder_ / "real", elsewhere / "real");
  std::filesystem::create_symlink(elsewhere / "real", folder_ / "1.safetensors");
  Index(R"("a":"1.safetensors")", "{}");
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

TEST_F(ModelFilesTest, RefusesAMissingShard) {
  Shard("1.safetensors", "a");
  Index(two_);
  Refuses("2.safetensors': No such file");
}

TEST_F(ModelFilesTest, RefusesATensorThatIsNotInItsShard) {
  Shard("1.safetensors", "a");
  Index(R"("a":"1.safetensors","b":"1.safetensors")", "{}");
  Refuses("has no tensor 'b'");
}

TEST_F(ModelFilesTest, RefusesATensorThatTheIndexDoesNotList) {
  Shard("1.safetensors", "a");
  Shard("2.safetensors", "c");
  Index(two_);
  Refuses("does not list it");
}

TEST_F(ModelFilesTest, TakesATensorOfTwoShardsFromWhereTheIndexSays) {
  Shard("1.safetensors", "a");
  WriteFile(folder_ / "2.safetensors",
            SafetensorsBytes("{" + Entry("\"U8\"", "[4]", "[0,4]", "a") + "," +
                                 Entry("\"U8\"", "[4]", "[4,8]", "b") + "}",
                             "efghijkl"));
  for (const char* shard : {"1.safetensors", "2.safetensors"}) {
    Index(R"("b":"2.safetensors","a":")" + std::string(shard) + "\"", "{}");
    EXPECT_EQ(ModelFiles(folder_.path()).tensors().at("a")->path().filename(), shard);
  }
}

TEST_F(ModelFilesTest, WarnsOfAnotherTotalSize) {
  Shard("1.safetensors", "a");
  Shard("2.safetensors", "b");
  Index(two_, "{\"total_size\":9}");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(ModelFiles(folder_.path()).tensors().size(), 2u);
  EXPECT_CONTAINS(::testing::internal::GetCapturedStderr(),
                  "claims 9 bytes of tensors, but its shards hold 8, which are read");
}

TEST_F(ModelFilesTest, RefusesDamagedIndexes) {
  const auto refuses = [&](const std::string& text, const std::string& part) {
    WriteFile(folder_ / kIndexFile, text);
    Refuses(part);
  };
  refuses("", "does not begin with '{'");
  refuses("{", "bad JSON");
  refuses("{}", "no object weight_map");
  refuses(R"({"weight_map":[]})", "no object weight_map");
  refuses(R"({"weight_map":{"a":1}})", "no file name for \"a\"");
  refuses(R"({"weight_map":{"a":"x","a":"y"}})", "\"a\" appears twice");
  refuses(std::string(R"({"weight_map":)") + std::string(100'000, '['), "nested deeper");
}

TEST_F(ModelFilesTest, RefusesAnIndexThatIsNoFile) {
  std::filesystem::create_directory(folder_ / kIndexFile);
  Refuses("not a regular file");
}

}  // namespace
}  // namespace tessera::checkpoint
