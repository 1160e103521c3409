#include <thread>

#include "data/small_tokenizers.h"
#include "testing/errors.h"

namespace tessera::data {
namespace {

using Ids = std::vector<std::int64_t>;
using testing::ByteFallbackJson;
using testing::ByteLevelJson;
using testing::Open;
using Json = nlohmann::json;

Json Added(int id, const std::string& content, bool normalized = false) {
  return {{"id", id}, {"content", content}, {"special", false}, {"normalized", normalized}};
}

TEST(HuggingFaceTokenizer, EncodesAndDecodes) {
  const auto tokenizer = Open(ByteLevelJson());
  EXPECT_EQ(tokenizer->vocabulary(), 8);
  // The merge "b c" is applied before the merge "a b", because "b c" has the lower rank.
  EXPECT_EQ(tokenizer->encode("abc ab"), (Ids{0, 4, 3, 5}));
  EXPECT_EQ(tokenizer->decode({0, 4, 3, 5}), "abc ab");
  EXPECT_EQ(tokenizer->encode(""), Ids{});
  EXPECT_EQ(tokenizer->encode("a<s>b"), (Ids{0, 7, 1}));
  EXPECT_EQ(tokenizer->decode({0, 7, 1}), "ab");
  EXPECT_ERROR(tokenizer->encode("d"), "has no token for 'd'");
  EXPECT_ERROR(tokenizer->decode({8}), "token 8 is outside");
  EXPECT_ERROR(tokenizer->decode({-1}), "token -1 is outside");
  std::string text;
  Ids ids;
  for (int i = 0; i < 1000; ++i) {
    text += "abbc";
    ids.insert(ids.end(), {5, 4});
  }
  EXPECT_EQ(tokenizer->encode(text), ids);
  // With ignore_merges, a word that is in the vocabulary becomes one token.
  Json json = ByteLevelJson();
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(Open(json)->encode("abc abc"), (Ids{6, 3, 0, 4}));
}

TEST(HuggingFaceTokenizer, MergesConsecutiveUnknownCharactersWithoutByteFallback) {
  Json json = ByteFallbackJson();
  json["model"]["byte_fallback"] = false;
  EXPECT_EQ(Open(json)->encode("axyza"), (Ids{260, 0, 258}));
}

TEST(HuggingFaceTokenizer, PrefersTheLongestAddedToken) {
  Json json = ByteLevelJson();
  json["added_tokens"].push_back(Added(5, "ab"));
  json["added_tokens"].push_back(Added(6, "abc"));
  EXPECT_EQ(Open(json)->encode("a  ab abcb"), (Ids{0, 3, 3, 5, 3, 6, 1}));
}

TEST(HuggingFaceTokenizer, FindsNormalizedTokensInTheNormalizedText) {
  Json json = ByteLevelJson();
  json["normalizer"] = {{"type", "NFC"}};
  json["added_tokens"].push_back(Added(8, "\u00e9", /*normalized=*/true));
  EXPECT_EQ(Open(json)->encode("ae\u0301"), (Ids{0, 8}));
}

/// Returns ByteLevelJson() with a post-processing template in which <t> means two tokens.
Json WithTemplate(Json single) {
  Json json = ByteLevelJson();
  json["post_processor"]["single"] = std::move(single);
  json["post_processor"]["special_tokens"]["<t>"] = {
      {"id", "<t>"}, {"ids", {6, 5}}, {"tokens", {"abc", "ab"}}};
  return json;
}

Json TokenPiece(const char* name) {
  return {{"SpecialToken", {{"id", name}, {"type_id", 0}}}};
}

Json TextPiece() {
  return {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
}

TEST(HuggingFaceTokenizer, BeginsAndEndsATextWithSeveralTokens) {
  const auto tokenizer = Open(WithTemplate(
      {TokenPiece("<s>"), TokenPiece("<t>"), TextPiece(), TokenPiece("<t>"), TokenPiece("<s>")}));
  EXPECT_EQ(tokenizer->begin_tokens(), (Ids{7, 6, 5}));
  EXPECT_EQ(tokenizer->end_tokens(), (Ids{6, 5, 7}));
  EXPECT_EQ(tokenizer->begins_texts(), true);
  EXPECT_EQ(Open(ByteLevelJson())->begin_tokens(), Ids{7});
  EXPECT_EQ(Open(ByteFallbackJson())->begin_tokens(), Ids{});
  Json json = WithTemplate(Json::array({TextPiece()}));
  EXPECT_EQ(Open(json)->begins_texts(), false);
  // If the first post-processor adds no tokens, the second post-processor may add tokens.
  json["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {json["post_processor"], WithTemplate({TextPiece(), TokenPiece("<s>")})["post_processor"]}}};
  EXPECT_EQ(Open(json)->end_tokens(), Ids{7});
}

TEST(HuggingFaceTokenizer, RefusesTemplatesThatDoNotContainTheTextOnce) {
  EXPECT_ERROR(Open(WithTemplate({TextPiece(), TokenPiece("<s>"), TextPiece()})),
               R"("post_processor.single[2]" is)", "it must be the only Sequence A");
  EXPECT_ERROR(Open(WithTemplate(Json::array({TokenPiece("<s>")}))),
               R"("post_processor.single" is)", "it must be a list with a Sequence A");
  Json json = ByteLevelJson();
  const Json step = json["post_processor"];
  json["post_processor"] = {{"type", "Sequence"}, {"processors", {step, step}}};
  EXPECT_ERROR(Open(json), R"("post_processor.processors[1]" is)",
               "it must be the only template with tokens");
}

TEST(HuggingFaceTokenizer, IsThreadSafe) {
  const auto tokenizer = Open(ByteLevelJson());
  std::vector<Ids> ids(4);
  std::vector<std::thread> threads;
  for (Ids& result : ids) {
    threads.emplace_back([&] { result = tokenizer->encode("abc ab bc<s>a"); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Ids& result : ids) {
    EXPECT_EQ(result, (Ids{0, 4, 3, 5, 3, 4, 7, 0}));
  }
}

struct WrongValue {
  const char* place;
  Json value;
  const char* message;
};

void ExpectRefused(const std::vector<WrongValue>& values) {
  for (const WrongValue& wrong : values) {
    SCOPED_TRACE(wrong.message);
    Json json = ByteLevelJson();
    json[Json::json_pointer(wrong.place)] = wrong.value;
    EXPECT_ERROR(Open(json), wrong.message, "tokenizer.json");
  }
}

TEST(HuggingFaceTokenizer, NamesUnsupportedSettings) {
  ExpectRefused({
      {"/model/type", "WordPiece", R"("model.type" is "WordPiece", which is not implemented)"},
      {"/model", {{"type", "Unigram"}, {"vocab", {{"a", -1.0}}}}, R"("model.type" is "Unigram")"},
      {"/model/dropout", 0.1, R"("model.dropout" is 0.1)"},
      {"/model/end_of_word_suffix", "</w>", R"("model.end_of_word_suffix" is "</w>")"},
      {"/normalizer", {{"type", "Nmt"}}, R"("normalizer.type" is "Nmt")"},
      {"/pre_tokenizer/pretokenizers/0/type", "BertPreTokenizer",
       R"("pre_tokenizer.pretokenizers[0].type" is "BertPreTokenizer")"},
      {"/pre_tokenizer/pretokenizers/0/behavior", "Random", R"(behavior" is "Random")"},
      {"/decoder/type", "WordPiece", R"("decoder.type" is "WordPiece")"},
      {"/post_processor/type", "BertProcessing", R"("post_processor.type" is "BertProcessing")"},
      {"/pre_tokenizer/pretokenizers/0/pattern", {{"String", "a"}}, R"(pattern.String" is "a")"},
      {"/normalizer",
       {{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", ""}},
       R"("normalizer.pattern.Regex" is "a")"},
      {"/added_tokens/0/lower", true, R"("added_tokens[0].lower" is true)"},
      {"/added_tokens/0/single_word", true, R"("added_tokens[0].single_word" is true)"},
      {"/added_tokens/0/lstrip", true, R"("added_tokens[0].lstrip" is true)"},
      {"/added_tokens/0/rstrip", true, R"("added_tokens[0].rstrip" is true)"},
      {"/vocab_hash", 1, R"("vocab_hash" is 1)"},
      {"/vocab\nhash", 1, R"("vocab\nhash" is 1)"},
  });
}

TEST(HuggingFaceTokenizer, RefusesInconsistentSettings) {
  ExpectRefused({
      {"/model/merges/0", "b d", R"("model.merges[0]" is "b d"; it must be a merge of tokens)"},
      {"/model/merges/0", "b c d", R"("model.merges[0]" is "b c d"; it must be two tokens)"},
      {"/model/vocab/a", -1, R"("model.vocab.a" is -1; it must be a number below 2000000)"},
      {"/model/vocab/a", 2'000'000, R"("model.vocab.a" is 2000000)"},
      {"/model/vocab", "a", R"("model.vocab" is "a"; it must be an object)"},
      {"/model/unk_token", "?", R"("model.unk_token" is "?"; it must be a token)"},
      {"/added_tokens/0/id", 3, R"("added_tokens[0]" is)"},
      {"/added_tokens/0/id", 8, "or a new token with the next id, 7"},
      {"/post_processor/special_tokens/<s>/ids/0", 8, "it must be a number below 8"},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "__"}},
       R"("pre_tokenizer.replacement" is "__"; it must be one character)"},
  });
}

TEST(HuggingFaceTokenizer, RefusesInvalidAndUnsupportedPatterns) {
  std::vector<WrongValue> values = {{"", "(a", "'(a' is not a regular expression"},
                                    {"", "\\p{InArrows}", "has '\\p{InArrows}'"},
                                    {"", "\\p{^L}", "has '\\p{^L}'"},
                                    {"", "[a", "a character class has no ]"},
                                    {"", "[a[b]]", "has '[..['"},
                                    {"", "[a&&b]", "has '&&'"},
                                    {"", "[a\\w]", R"(has '\w')"},
                                    {"", "\n(a", R"(pattern '\x0a(a' is not)"},
                                    {"", "a{2}?", "has '{}?'"}};
  for (const char* escape : {"\\R", "\\b", "\\d", "\\xC3"}) {
    values.push_back({"", escape, "which is not implemented"});
  }
  for (WrongValue& wrong : values) {
    wrong.place = "/pre_tokenizer/pretokenizers/0/pattern/Regex";
  }
  ExpectRefused(values);
}

TEST(HuggingFaceTokenizer, StopsPatternsAtTheMatchLimit) {
  Json json = ByteLevelJson();
  json["/pre_tokenizer/pretokenizers/0/pattern/Regex"_json_pointer] = "(?:a|b|ab)+[cd]";
  const auto tokenizer = Open(json);
  std::string text;
  for (int i = 0; i < 200; ++i) {
    text += "ab";
  }
  EXPECT_ERROR(tokenizer->encode(text), "(?:a|b|ab)+[cd]", "match limit");
}

TEST(HuggingFaceTokenizer, SplitsLongRunsOfSpaces) {
  Json json = ByteLevelJson();
  // The pattern of Llama 3 splits a text into words.
  json["/pre_tokenizer/pretokenizers/0/pattern/Regex"_json_pointer] =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  const std::string spaces(1'500'000, ' ');
  EXPECT_EQ(Open(json)->encode(spaces + "a").size(), spaces.size() + 1);
}

TEST(HuggingFaceTokenizer, StopsNormalizersThatEnlargeTheTextTooMuch) {
  Json json = ByteLevelJson();
  const Json tenfold = {
      {"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(10, 'a')}};
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array({tenfold})}};
  EXPECT_EQ(Open(json)->encode("a").size(), 10U);
  for (int i = 0; i < 15; ++i) {
    json["normalizer"]["normalizers"].push_back(tenfold);
  }
  EXPECT_ERROR(Open(json)->encode("a"), "a text of 1 bytes more than 32 times longer");
  json["normalizer"] = {
      {"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(2000, 'a')}};
  EXPECT_ERROR(Open(json)->encode("a"), "replacements make a text of 1 bytes");
}

using nlohmann::json;

TEST(HuggingFaceTokenizer, RefusesPreTokenizersAfterByteLevel) {
  for (const char* type : {"Digits", "Metaspace", "ByteLevel"}) {
    json all = testing::ByteLevelJson();
    all["pre_tokenizer"]["pretokenizers"].push_back({{"type", type}});
    EXPECT_ERROR(Open(all), R"("pre_tokenizer.pretokenizers[2]" is {"type":")",
                 "it must be before ByteLevel");
  }
}

// In the following tests, further files in the folder of tokenizer.json change the tokenizer.

class TokenizerConfigFiles : public ::testing::Test {
 protected:
  TokenizerConfigFiles() { WriteTokenizer(testing::ByteLevelJson()); }

  void WriteTokenizer(const json& tokenizer) {
    testing::WriteFile(folder_ / "tokenizer.json", tokenizer.dump());
  }
  /// Writes a tokenizer.json without a template, like that of DeepSeek: only tokenizer_config.json
  /// names the begin token.
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

TEST_F(TokenizerConfigFiles, DecideBeginAndEndTokensForLlama) {
  WithoutTemplate();
  EXPECT_EQ(open_tokenizer(folder_.path())->begins_texts(), false);
  const json llama = {{"tokenizer_class", "LlamaTokenizerFast"}, {"eos_token", "abc"}};
  json config = llama;
  EXPECT_EQ(OpenWith(config)->begins_texts(), true);
  EXPECT_EQ(OpenWith(config)->begin_tokens(), Ids{7});
  EXPECT_EQ(OpenWith(config)->end_tokens(), Ids{});
  config["add_bos_token"] = false;
  config["add_eos_token"] = true;
  EXPECT_EQ(OpenWith(config)->begins_texts(), false);
  EXPECT_EQ(OpenWith(config)->begin_tokens(), Ids{7});
  EXPECT_EQ(OpenWith(config)->end_tokens(), Ids{6});
  config["bos_token"] = {{"__type", "AddedToken"}, {"content", "a"}, {"normalized", true}};
  EXPECT_EQ(OpenWith(config)->begin_tokens(), Ids{0});
  WriteTokenizer(testing::ByteLevelJson());
  EXPECT_EQ(OpenWith({{"add_bos_token", false}})->begins_texts(), false);
}

TEST_F(TokenizerConfigFiles, MustAgreeWithTheTemplate) {
  const json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"bos_token", "<s>"}};
  json other = config;
  other["add_bos_token"] = true;
  EXPECT_EQ(OpenWith(config)->begins_texts(), true);
  EXPECT_EQ(OpenWith(other)->begins_texts(), true);
  WithoutTemplate();
  EXPECT_EQ(OpenWith(config)->begins_texts(), false);
  EXPECT_ERROR(OpenWith(other), "\"add_bos_token\"", "is true",
               "the post_processor of tokenizer.json adds no token there");
}

TEST_F(TokenizerConfigFiles, MustAgreeWithThePrefixSpaceSetting) {
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
               "has false; make both files agree");
  EXPECT_ERROR(OpenWith(gpt2), "has no such flag, so transformers uses false");
  write(false);
  EXPECT_EQ(OpenWith(gpt2)->encode("a"), (Ids{0}));
  EXPECT_ERROR(OpenWith({{"add_prefix_space", true}}), "pre_tokenizer is false, but",
               "has true; make both files agree");
  // If tokenizer.json has a sequence of pre-tokenizers, add_prefix_space has no effect.
  WriteTokenizer(testing::ByteLevelJson());
  EXPECT_EQ(OpenWith({{"add_prefix_space", true}})->encode("a"), (Ids{0}));
}

TEST_F(TokenizerConfigFiles, AddTokens) {
  const json config = {{"added_tokens_decoder",
                        {{"8", {{"content", "<t>"}, {"special", true}}},
                         {"6", {{"content", "abc"}, {"special", false}, {"normalized", false}}}}},
                       {"pad_token", "<pad>"}};
  const TokenizerPtr tokenizer = OpenWith(config);
  EXPECT_EQ(tokenizer->vocabulary(), 10);
  EXPECT_EQ(tokenizer->encode("a<t>aabc<pad>"), (Ids{0, 8, 0, 6, 9}));
  EXPECT_EQ(tokenizer->decode({0, 8, 6}), "aabc");
  // Older tokenizers store added tokens in added_tokens.json and special_tokens_map.json.
  testing::WriteFile(folder_ / "added_tokens.json", R"({"<u>": 8})");
  testing::WriteFile(folder_ / "special_tokens_map.json",
                     R"({"additional_special_tokens": ["<u>"], "eos_token": "c"})");
  EXPECT_EQ(OpenWith(json::object())->encode("<u>a"), (Ids{8, 0}));
  EXPECT_EQ(OpenWith(json::object())->decode({8, 0}), "a");
  EXPECT_ERROR(OpenWith(config)->encode("<u>"), "has no token for '<'");
}

TEST_F(TokenizerConfigFiles, AreListedByTokenizerFiles) {
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
  // If tokenizer_config.json has added_tokens_decoder, the two older files are ignored.
  OpenWith({{"added_tokens_decoder", json::object()}});
  EXPECT_EQ(names(), (Names{"tokenizer.json", "tokenizer_config.json"}));
}

TEST_F(TokenizerConfigFiles, MustNotContradictTokenizerJson) {
  const auto with = [&](const char* id, const char* content) {
    return OpenWith({{"added_tokens_decoder", {{id, {{"content", content}}}}}});
  };
  EXPECT_ERROR(with("5", "abc"), "give 'abc' the id 5, but the tokenizer has the id 6",
               "tokenizer.json");
  EXPECT_ERROR(with("12", "<t>"), "give '<t>' the id 12, but the next new token has the id 8");
  EXPECT_ERROR(with("x", "<t>"), "\"added_tokens_decoder.x\"",
               "under a key that is the id of a token");
  EXPECT_ERROR(OpenWith({{"bos_token", 3}}), "tokenizer.json", "\"bos_token");
  OpenWith({{"extra_special_tokens", json::object()}});
  EXPECT_ERROR(OpenWith({{"extra_special_tokens", {{"x_token", "<x>"}}}}),
               R"("extra_special_tokens.x_token" is "<x>", which is not implemented)");
  testing::WriteFile(folder_ / "tokenizer_config.json", "[");
  EXPECT_ERROR(open_tokenizer(folder_.path()), "tokenizer_config.json'", "JSON");
  std::filesystem::remove(folder_ / "tokenizer_config.json");
  std::filesystem::create_symlink("gone", std::string(folder_ / "added_tokens.json"));
  EXPECT_ERROR(open_tokenizer(folder_.path()), "added_tokens.json",
               "a link to a file that does not exist");
}

}  // namespace
}  // namespace tessera::data
