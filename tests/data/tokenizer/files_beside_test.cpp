// What the files beside a tokenizer's add to it.
#include <gtest/gtest.h>

#include <string>

#include "data/tokenizer/small_tokenizers.h"
#include "testing/errors.h"

namespace tessera::data {
namespace {

using Ids = std::vector<std::int64_t>;
using nlohmann::json;

/// A folder with a tokenizer.json, and what is put beside it.
class FilesBesideJson : public ::testing::Test {
 protected:
  FilesBesideJson() { WriteTokenizer(testing::ByteLevelJson()); }

  void WriteTokenizer(const json& tokenizer) {
    testing::WriteFile(folder_ / "tokenizer.json", tokenizer.dump());
  }
  /// As DeepSeek's: what begins a text is said beside the tokenizer alone.
  void WithoutTemplate() {
    json tokenizer = testing::ByteLevelJson();
    tokenizer["post_processor"] = {{"type", "ByteLevel"}};
    WriteTokenizer(tokenizer);
  }
  TokenizerPtr OpenWith(const json& config) {
    testing::WriteFile(folder_ / "tokenizer_config.json", config.dump());
    return open_tokenizer(folder_.path());
  }

  testing::TemporaryFolder folder_;
};

TEST_F(FilesBesideJson, AreOptional) {
  EXPECT_EQ(open_tokenizer(folder_.path())->begins_texts(), true);
  EXPECT_EQ(open_tokenizer(folder_.path())->begin_tokens(), Ids{7});
  WithoutTemplate();
  EXPECT_EQ(open_tokenizer(folder_.path())->begins_texts(), false);
}

TEST_F(FilesBesideJson, SayWhichTokensLlamasClassPutsAroundAText) {
  WithoutTemplate();
  const json llama = {{"tokenizer_class", "LlamaTokenizerFast"}, {"eos_token", "abc"}};
  json config = llama;
  EXPECT_EQ(OpenWith(config)->begins_texts(), true);
  EXPECT_EQ(OpenWith(config)->begin_tokens(), Ids{7});
  EXPECT_EQ(OpenWith(config)->end_tokens(), Ids{});
  config["add_bos_token"] = false;
  config["add_eos_token"] = true;
  EXPECT_EQ(OpenWith(config)->begins_texts(), false);
  EXPECT_EQ(OpenWith(config)->begin_tokens(), Ids{7});  // for who asks for it
  EXPECT_EQ(OpenWith(config)->end_tokens(), Ids{6});
  config["bos_token"] = {{"__type", "AddedToken"}, {"content", "a"}, {"normalized", true}};
  EXPECT_EQ(OpenWith(config)->begin_tokens(), Ids{0});
  WriteTokenizer(testing::ByteLevelJson());
  EXPECT_EQ(OpenWith({{"add_bos_token", false}})->begins_texts(), false);
}

TEST_F(FilesBesideJson, HaveToAgreeWithTheTemplateForOtherClasses) {
  const json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"bos_token", "<s>"}};
  json other = config;
  other["add_bos_token"] = true;
  EXPECT_EQ(OpenWith(config)->begins_texts(), true);
  EXPECT_EQ(OpenWith(other)->begins_texts(), true);
  WithoutTemplate();
  EXPECT_EQ(OpenWith(config)->begins_texts(), false);
  EXPECT_ERROR(OpenWith(other), "\"add_bos_token\" beside the tokenizer is true",
               "the post_processor of tokenizer.json adds no token there");
}

TEST_F(FilesBesideJson, HaveToAgreeWithTheSpaceBeforeAText) {
  json tokenizer = testing::ByteLevelJson();
  const auto write = [&](bool adds) {
    tokenizer["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", adds}};
    WriteTokenizer(tokenizer);
  };
  const json gpt2 = {{"tokenizer_class", "GPT2Tokenizer"}};
  write(true);
  EXPECT_EQ(OpenWith(json::object())->encode("a"), (Ids{3, 0}));
  EXPECT_EQ(OpenWith({{"add_prefix_space", true}})->encode("a"), (Ids{3, 0}));
  EXPECT_ERROR(OpenWith({{"add_prefix_space", false}}),
               "\"add_prefix_space\" of the pre_tokenizer is true, but tokenizer_config.json",
               "has false: make them agree");
  EXPECT_ERROR(OpenWith(gpt2), "has none, which transformers takes for false: make them agree");
  write(false);
  EXPECT_EQ(OpenWith(gpt2)->encode("a"), (Ids{0}));
  EXPECT_ERROR(OpenWith({{"add_prefix_space", true}}), "pre_tokenizer is false, but",
               "has true: make them agree");
  // A step among others keeps its own.
  WriteTokenizer(testing::ByteLevelJson());
  EXPECT_EQ(OpenWith({{"add_prefix_space", true}})->encode("a"), (Ids{0}));
}

TEST_F(FilesBesideJson, AddTokens) {
  const json config = {{"added_tokens_decoder",
                        {{"8", {{"content", "<t>"}, {"special", true}, {"rstrip", true}}},
                         {"6", {{"content", "abc"}, {"special", false}, {"normalized", false}}}}},
                       {"pad_token", "<pad>"}};
  const TokenizerPtr tokenizer = OpenWith(config);
  EXPECT_EQ(tokenizer->vocabulary(), 10);  // <pad> is the next
  EXPECT_EQ(tokenizer->encode("a<t>  aabc<pad>"), (Ids{0, 8, 0, 6, 9}));
  EXPECT_EQ(tokenizer->decode({0, 8, 6}), "aabc");
  // Older files have them by themselves.
  testing::WriteFile(folder_ / "added_tokens.json", R"({"<u>": 8})");
  testing::WriteFile(folder_ / "special_tokens_map.json",
                     R"({"additional_special_tokens": ["<u>"], "eos_token": "c"})");
  EXPECT_EQ(OpenWith(json::object())->encode("<u>a"), (Ids{8, 0}));
  EXPECT_EQ(OpenWith(json::object())->decode({8, 0}), "a");
  EXPECT_ERROR(OpenWith(config)->encode("<u>"), "has no token for '<'");  // it does not read those
}

TEST_F(FilesBesideJson, AddExtraSpecialTokensInTheirOrder) {
  testing::WriteFile(folder_ / "tokenizer_config.json",
                     R"({"extra_special_tokens": {"z_token": "<x>", "a_token": "<y>"}})");
  const TokenizerPtr tokenizer = open_tokenizer(folder_.path());
  EXPECT_EQ(tokenizer->encode("a<y><x>"), (Ids{0, 9, 8}));
  EXPECT_EQ(tokenizer->decode({0, 9, 8}), "a");
}

TEST_F(FilesBesideJson, AreAmongTheFilesThatDecideOnIds) {
  const auto names = [&] {
    std::vector<std::string> all;
    for (const std::string& file : tokenizer_files(folder_.path())) {
      all.push_back(std::filesystem::path(file).filename());
    }
    return all;
  };
  using Names = std::vector<std::string>;
  testing::WriteFile(folder_ / "added_tokens.json", "{}");
  EXPECT_EQ(names(), (Names{"tokenizer.json", "added_tokens.json"}));
  testing::WriteFile(folder_ / "special_tokens_map.json", "{}");
  OpenWith(json::object());
  EXPECT_EQ(names(), (Names{"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                            "added_tokens.json"}));
  // Which then has all of them.
  OpenWith({{"added_tokens_decoder", json::object()}});
  EXPECT_EQ(names(), (Names{"tokenizer.json", "tokenizer_config.json"}));
}

TEST_F(FilesBesideJson, AreNotLinksToNothing) {
  std::filesystem::create_symlink("gone", std::string(folder_ / "added_tokens.json"));
  EXPECT_ERROR(open_tokenizer(folder_.path()), "added_tokens.json",
               "a link to a file that is gone");
}

TEST_F(FilesBesideJson, DoNotContradictTheTokenizer) {
  const auto with = [&](const char* id, const char* content) {
    return OpenWith({{"added_tokens_decoder", {{id, {{"content", content}}}}}});
  };
  EXPECT_ERROR(with("5", "abc"), "give 'abc' the id 5, but it is the token of id 6",
               "tokenizer.json");
  EXPECT_ERROR(with("12", "<t>"),
               "give '<t>' the id 12, but it is a new token, and the next id is 8");
  EXPECT_ERROR(with("x", "<t>"), "\"added_tokens_decoder.x\"", "under the id of a token");
  EXPECT_ERROR(OpenWith({{"bos_token", 3}}), "the files beside the tokenizer", "\"bos_token");
  testing::WriteFile(folder_ / "tokenizer_config.json", "[");
  EXPECT_ERROR(open_tokenizer(folder_.path()), "tokenizer_config.json' beside the tokenizer: JSON");
}

}  // namespace
}  // namespace tessera::data
