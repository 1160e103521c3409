#include <c10/util/Flags.h>
#include <dlfcn.h>

#include "data/small_tokenizers.h"
#include "testing/errors.h"

C10_DECLARE_bool(caffe2_use_fatal_for_enforce);

namespace tessera::data {
namespace {

class SentencePieceTokenizer : public ::testing::Test {
 protected:
  SentencePieceTokenizer() { write(SmallModel()); }
  void write(const std::string& model) { testing::WriteFile(model_, model); }
  void configure(const std::string& config) {
    testing::WriteFile(folder_ / "tokenizer_config.json", config);
  }

  testing::TemporaryFolder folder_;
  const std::filesystem::path model_ = folder_ / "tokenizer.model";
};

TEST_F(SentencePieceTokenizer, RefusesMissingAndInvalidFiles) {
  EXPECT_ERROR(sentencepiece_tokenizer("/nowhere/tokenizer.model"), "tokenizer.model");
  // The SentencePiece library throws if the text of a piece is empty.
  for (const std::string& bytes : {std::string("not a model"), SmallModel() + Piece("", -4, 1)}) {
    write(bytes);
    EXPECT_ERROR(sentencepiece_tokenizer(model_), "tokenizer.model' is not a SentencePiece model");
  }
}

/// libsentencepiece and libc10 define a flag of the same name. If libsentencepiece's flag replaced
/// libc10's flag, every error of libtorch would end the process instead of throwing.
TEST_F(SentencePieceTokenizer, DoesNotOverwriteLibtorchsFlags) {
  if (dlsym(RTLD_DEFAULT, "__asan_init") != nullptr) {
    GTEST_SKIP() << "AddressSanitizer refuses libraries with a scope of their own";
  }
  EXPECT_EQ(sentencepiece_tokenizer(model_)->vocabulary(), 6);
  EXPECT_FALSE(FLAGS_caffe2_use_fatal_for_enforce);
}

TEST_F(SentencePieceTokenizer, EncodesAndDecodes) {
  const auto tokenizer = sentencepiece_tokenizer(model_);
  EXPECT_EQ(tokenizer->vocabulary(), 6);
  EXPECT_EQ(tokenizer->encode("a bc a"), (std::vector<std::int64_t>{3, 4, 5, 3}));
  EXPECT_EQ(tokenizer->decode({3, 4, 5, 3}), "a bc a");
  EXPECT_EQ(tokenizer->begin_tokens(), std::vector<std::int64_t>{1});
  EXPECT_EQ(tokenizer->end_tokens(), std::vector<std::int64_t>{2});
  EXPECT_ERROR(tokenizer->decode({6}), "token 6 is outside");
  EXPECT_ERROR(tokenizer->decode({-1}), "token -1 is outside");
}

TEST_F(SentencePieceTokenizer, FindsSpecialTokensInAText) {
  const auto ids = [&](const char* text) { return open_tokenizer(model_)->encode(text); };
  using Ids = std::vector<std::int64_t>;
  EXPECT_EQ(ids("a</s>a<s><unk>"), (Ids{3, 2, 3, 1, 0}));
  testing::WriteFile(folder_ / "added_tokens.json", R"({"<t>": 6})");
  EXPECT_EQ(ids("a<t>a"), (Ids{3, 6, 3}));
  EXPECT_EQ(open_tokenizer(model_)->decode({3, 6, 3, 2}), "a<t>a");
  EXPECT_EQ(open_tokenizer(model_)->begins_texts(), std::nullopt);
  configure(R"({"tokenizer_class": "LlamaTokenizer", "legacy": false,
                         "add_bos_token": false, "pad_token": "<pad>"})");
  // Special tokens split a text into parts. Only the first part gets a leading space.
  EXPECT_EQ(ids("a</s>c<pad> a"), (Ids{3, 2, 5, 7, 3}));
  EXPECT_EQ(open_tokenizer(model_)->begins_texts(), false);
  testing::WriteFile(folder_ / "added_tokens.json", R"({"<t>": 8})");
  EXPECT_ERROR(ids("a"), "give '<t>' the id 8, but the next new token has the id 6");
  configure(R"({"tokenizer_class": "LlamaTokenizer", "legacy": false, "add_prefix_space": false})");
  EXPECT_ERROR(ids("a"), "\"add_prefix_space\": false", "is not implemented");
}

/// Returns SmallModel() with the additional piece "▁" (id 6), which marks a word's begin.
std::string ModelWithSpace() {
  return SmallModel() + Piece("\xe2\x96\x81", -4, 1);
}

TEST_F(SentencePieceTokenizer, DecodesSpecialTokensToNoText) {
  write(ModelWithSpace());
  configure(R"({"tokenizer_class": "LlamaTokenizer", "pad_token": "<pad>"})");
  const auto tokenizer = open_tokenizer(model_);
  EXPECT_EQ(tokenizer->decode({3, 7, 3, 2, 4, 5}), "a a bc");
  EXPECT_EQ(tokenizer->decode({3, 0, 4}), "a b");
  EXPECT_EQ(sentencepiece_tokenizer(model_)->decode({0, 3, 0}), "a");
}

/// The space that LlamaTokenizer puts before a text is dropped only before a special token.
TEST_F(SentencePieceTokenizer, PutsASpaceBeforeAnAddedTokenAtTheStart) {
  write(ModelWithSpace() + std::string("\x1a\x02\x20\x00", 4));  // remove_extra_whitespaces: false
  configure(R"({"tokenizer_class": "LlamaTokenizer", "legacy": false, "added_tokens_decoder": {
      "7": {"content": "<t>", "special": false}}})");
  const auto tokenizer = open_tokenizer(model_);
  EXPECT_EQ(tokenizer->encode("<t>c"), (std::vector<std::int64_t>{6, 7, 5}));
  EXPECT_EQ(tokenizer->encode("</s>c"), (std::vector<std::int64_t>{2, 5}));
}

TEST_F(SentencePieceTokenizer, StreamsSpaceTokens) {
  write(ModelWithSpace());
  StreamDecoder decoder(sentencepiece_tokenizer(model_));
  std::string text;
  for (const std::int64_t token : {6, 5, 6, 5, 6, 0, 3}) {
    text += decoder.push(token);
  }
  EXPECT_EQ(text + decoder.finish(), "c c  a");
}

}  // namespace
}  // namespace tessera::data
