// Names of models in the cache of Hugging Face's hub. tests/examples/launchers/test_hub_cache.py
// compares them with `huggingface_hub`.

#include "tessera/core/hub_cache.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "testing/environment.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera {
namespace {

using testing::WriteFile;

constexpr const char* kCommit = "0123456789abcdef0123456789abcdef01234567";

/// Sets the variables that decide where the cache is, those that are not named to "", which counts
/// as unset; restores the old ones at the end.
class Variables {
 public:
  explicit Variables(std::map<std::string, std::string> set) {
    for (const char* name :
         {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME", "PLACE"}) {
      variables_.push_back(std::make_unique<testing::ScopedVariable>(name, set[name]));
    }
  }

 private:
  std::vector<std::unique_ptr<testing::ScopedVariable>> variables_;
};

/// A cache with the model org/name, whose revision main is kCommit.
class HubCache : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(snapshot());
    std::filesystem::create_directories(model() / "refs");
    std::filesystem::create_directories(model() / "blobs");
    WriteFile(model() / "refs" / "main", kCommit);
  }

  std::filesystem::path model() const {
    return std::filesystem::path(folder_.path()) / "models--org--name";
  }
  std::filesystem::path snapshot() const { return model() / "snapshots" / kCommit; }
  // Adds a file as a download does: a link into blobs.
  void Add(const std::string& file, const std::string& text = "{}") {
    WriteFile(model() / "blobs" / file, text);
    std::filesystem::create_symlink("../../blobs/" + file, snapshot() / file);
  }

  testing::TemporaryFolder folder_;
  Variables variables_{{{"HF_HUB_CACHE", folder_.path()}}};
};

TEST(HubCachePlace, IsWhatTheVariablesSay) {
  using Set = std::map<std::string, std::string>;
  const auto place = [](const Set& set) {
    const Variables variables(set);
    return hub_cache().string();
  };
  EXPECT_EQ(place({{"HOME", "/h"}}), "/h/.cache/huggingface/hub");
  EXPECT_EQ(place({{"HOME", "/h"}, {"XDG_CACHE_HOME", "/x"}}), "/x/huggingface/hub");
  EXPECT_EQ(place({{"HF_HOME", "/hf"}, {"XDG_CACHE_HOME", "/x"}}), "/hf/hub");
  EXPECT_EQ(place({{"HF_HOME", "/hf"}, {"HUGGINGFACE_HUB_CACHE", "/old"}}), "/old");
  EXPECT_EQ(place({{"HF_HUB_CACHE", "/new"}, {"HUGGINGFACE_HUB_CACHE", "/old"}}), "/new");
  EXPECT_EQ(place({{"HOME", "/h"}, {"HF_HOME", "~/hf"}}), "/h/hf/hub");
  EXPECT_EQ(place({{"PLACE", "/p"}, {"HF_HOME", "$PLACE/${PLACE}/$NONE"}}), "/p//p/$NONE/hub");
}

TEST_F(HubCache, FindsTheSnapshotOfMain) {
  Add("config.json");
  Add("tokenizer.json");
  EXPECT_EQ(hub_path("org/name", HubItem::kModel), snapshot());
  EXPECT_EQ(hub_path("org/name", HubItem::kTokenizer), snapshot());
  EXPECT_EQ(hub_path("org/name", HubItem::kConfig), snapshot() / "config.json");
}

TEST_F(HubCache, TakesARevisionBehindAnAt) {
  Add("config.json");
  std::filesystem::create_directories(model() / "refs" / "refs" / "pr");
  WriteFile(model() / "refs" / "v1.0", kCommit);
  WriteFile(model() / "refs" / "refs" / "pr" / "3", kCommit);
  for (const std::string revision : {"v1.0", "refs/pr/3", kCommit}) {
    EXPECT_EQ(hub_path("org/name@" + revision, HubItem::kModel), snapshot()) << revision;
  }
  EXPECT_ERROR(hub_path("org/name@v2", HubItem::kModel), "the model org/name", "no revision v2",
               "fetch it with: hf download org/name --revision v2");
}

TEST_F(HubCache, APathWins) {
  const testing::TemporaryFolder here;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(here.path());
  std::filesystem::create_directories("org/name");
  EXPECT_EQ(hub_path("org/name", HubItem::kModel), "org/name");
  std::filesystem::current_path(before);
  for (const std::string path : {"", "/org/name", "./org/name", "a/b/c", "org/name.json",
                                 "org/tokenizer.model", "..", "../name", "org/na--me", "word"}) {
    EXPECT_EQ(hub_path(path, HubItem::kModel), path);
  }
}

TEST_F(HubCache, FindsAModelOfNoOrganisation) {
  const std::filesystem::path old = std::filesystem::path(folder_.path()) / "models--gpt2";
  std::filesystem::create_directories(old / "refs");
  std::filesystem::create_directories(old / "snapshots" / kCommit);
  WriteFile(old / "refs" / "main", kCommit);
  WriteFile(old / "snapshots" / kCommit / "config.json", "{}");
  EXPECT_EQ(hub_path("gpt2", HubItem::kModel), old / "snapshots" / kCommit);
}

TEST_F(HubCache, SaysHowToFetchAMissingModel) {
  EXPECT_ERROR(hub_path("org/other", HubItem::kModel), "'org/other' is neither here nor in",
               folder_.path().string(), "fetch it with: hf download org/other");
  EXPECT_ERROR(hub_path("org/name", HubItem::kModel), "org/name in the hub's cache",
               "has no config.json", "hf download org/name");
  EXPECT_ERROR(hub_path("org/name", HubItem::kTokenizer), "has no tokenizer.json");
  std::filesystem::remove(model() / "refs" / "main");
  EXPECT_ERROR(hub_path("org/name", HubItem::kModel), "no revision main");
}

TEST_F(HubCache, CountsALinkToNothingAsMissing) {
  Add("config.json");
  std::filesystem::remove(model() / "blobs" / "config.json");
  EXPECT_ERROR(hub_path("org/name", HubItem::kModel), "has no config.json");
}

TEST_F(HubCache, RefusesHalfOfTheWeights) {
  Add("config.json");
  EXPECT_ERROR(check_hub_weights(snapshot()), "org/name", "has no model.safetensors.index.json",
               std::string("hf download org/name --revision ") + kCommit);
  Add("model.safetensors.index.json",
      R"({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}})");
  Add("model-1-of-2.safetensors");
  EXPECT_ERROR(check_hub_weights(snapshot()), "has no model-2-of-2.safetensors");
  Add("model-2-of-2.safetensors");
  EXPECT_NO_THROW(check_hub_weights(snapshot()));
  std::filesystem::remove(model() / "blobs" / "model-1-of-2.safetensors");
  EXPECT_ERROR(check_hub_weights(snapshot()), "has no model-1-of-2.safetensors");
  Add("model.safetensors");
  EXPECT_NO_THROW(check_hub_weights(snapshot()));
  EXPECT_NO_THROW(check_hub_weights(folder_.path()));
}

}  // namespace
}  // namespace tessera
