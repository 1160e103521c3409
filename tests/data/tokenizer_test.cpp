#include "data/small_tokenizers.h"
#include "testing/errors.h"

namespace tessera::data {
namespace {

TEST(ByteTokenizer, MapsEveryByteToItself) {
  const auto tokenizer = byte_tokenizer();
  std::string all;
  for (int byte = 0; byte < 256; ++byte) {
    all.push_back(static_cast<char>(byte));
  }
  const auto tokens = tokenizer->encode(all);
  ASSERT_EQ(tokens.size(), 256u);
  for (std::size_t i = 0; i < 256; ++i) {
    EXPECT_EQ(tokens[i], static_cast<std::int64_t>(i));
  }
  EXPECT_EQ(tokenizer->decode(tokens), all);
  EXPECT_EQ(tokenizer->vocabulary(), 256);
  EXPECT_ERROR(tokenizer->decode({256}), "token 256");
  EXPECT_ERROR(tokenizer->decode({-1}), "token -1");
}

using Ids = std::vector<std::int64_t>;

TEST(TiktokenTokenizer, MergesByTheRankOfTheResult) {
  const testing::TemporaryFolder folder;
  testing::WriteFile(folder / "tokenizer.model", testing::TiktokenLines());
  const auto tokenizer = tiktoken_tokenizer(folder / "tokenizer.model", /*any_size=*/true);
  EXPECT_EQ(tokenizer->encode("abb a"), (Ids{2, 1, 3, 0}));
  EXPECT_EQ(tokenizer->decode({2, 1, 3, 0}), "abb a");
  // Llama 3 adds 256 special tokens to the tokens of the file.
  EXPECT_EQ(tokenizer->vocabulary(), 4 + 256);
  EXPECT_EQ(tokenizer->begin_tokens(), Ids{4});
  EXPECT_EQ(tokenizer->end_tokens(), Ids{5});
  EXPECT_EQ(tokenizer->encode("a<|eot_id|>"), (Ids{0, 4 + 9}));
}

TEST(TiktokenTokenizer, NamesTheInvalidLine) {
  const testing::TemporaryFolder folder;
  const auto file = folder / "tokenizer.model";
  for (const char* line : {"Yg== 2", "Yg= 1", "Y*== 1", "Yg==", " 1"}) {
    SCOPED_TRACE(line);
    testing::WriteFile(file, std::string("YQ== 0\n") + line + "\n");
    EXPECT_ERROR(tiktoken_tokenizer(file),
                 "line 2 must be a token in base64, a space and the rank 1", "tokenizer.model");
  }
  testing::WriteFile(file, "YQ== 0\nYQ== 1\n");
  EXPECT_ERROR(tiktoken_tokenizer(file, /*any_size=*/true), "the token of rank 1 occurs twice");
  testing::WriteFile(file, "YQ== 0\r\nYg== 1\r\n");
  EXPECT_ERROR(open_tokenizer(file), "line 1 ends with CRLF", "tokenizer.model");
  testing::WriteFile(file, std::string(1336, 'A') + " 0\n");
  EXPECT_ERROR(tiktoken_tokenizer(file), "line 1 must be a token");
}

TEST(OpenTokenizer, DetectsTheFormatFromTheContent) {
  const testing::TemporaryFolder folder;
  testing::WriteFile(folder / "one", testing::TiktokenLines());
  testing::WriteFile(folder / "two", "\n" + testing::ByteLevelJson().dump(2));
  testing::WriteFile(folder / "three", "a text");
  EXPECT_ERROR(open_tokenizer(folder / "one"),
               "the file has 4 tokens, but Llama 3's tokenizer has 128000");
  EXPECT_EQ(open_tokenizer(folder / "two")->vocabulary(), 8);
  EXPECT_ERROR(open_tokenizer(folder / "three"), "three");
  EXPECT_ERROR(open_tokenizer(folder / "four"), "four");
  testing::WriteFile(folder / "five", "\xef\xbb\xbf" + testing::ByteLevelJson().dump());
  EXPECT_ERROR(open_tokenizer(folder / "five"), "begins with a byte order mark", "five");
}

TEST(OpenTokenizer, PrefersTokenizerJsonInAFolder) {
  const testing::TemporaryFolder folder;
  EXPECT_ERROR(open_tokenizer(folder.path()), "has no tokenizer.json and no tokenizer.model");
  testing::WriteFile(folder / "tokenizer.model", testing::TiktokenLines());
  EXPECT_ERROR(open_tokenizer(folder.path()), "tokenizer.model", "has 4 tokens");
  testing::WriteFile(folder / "tokenizer.json", testing::ByteLevelJson().dump());
  EXPECT_EQ(open_tokenizer(folder.path())->vocabulary(), 8);
}

std::vector<std::string> Pushed(StreamDecoder decoder, const std::vector<std::int64_t>& tokens) {
  std::vector<std::string> pieces;
  for (const std::int64_t token : tokens) {
    pieces.push_back(decoder.push(token));
  }
  pieces.push_back(decoder.finish());
  return pieces;
}

std::string Joined(StreamDecoder decoder, const std::vector<std::int64_t>& tokens) {
  std::string text;
  for (const std::string& piece : Pushed(std::move(decoder), tokens)) {
    text += piece;
  }
  return text;
}

using Pieces = std::vector<std::string>;

class Bytes : public Tokenizer {
 public:
  std::int64_t vocabulary() const override { return 256; }
  std::vector<std::int64_t> encode(std::string_view text) const override {
    return byte_tokenizer()->encode(text);
  }
};

/// Decodes bytes that are not valid UTF-8 to replacement characters, as SentencePiece does.
class ReplacingBytes final : public Bytes {
 public:
  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    const std::string text = byte_tokenizer()->decode(tokens);
    const std::string euro = "\u20ac";
    std::string out;
    for (std::size_t at = 0; at < text.size();) {
      const bool whole = text.compare(at, euro.size(), euro) == 0;
      out += whole ? euro : "\ufffd";
      at += whole ? euro.size() : 1;
    }
    return out;
  }
};

/// Removes leading spaces of a decoded text, as many SentencePiece models do. The special token is
/// "#".
class StrippingBytes final : public Bytes {
 public:
  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text = byte_tokenizer()->decode(tokens);
    std::erase(text, '#');
    return text.substr(std::min(text.find_first_not_of(' '), text.size()));
  }
};

TEST(StreamDecoder, HoldsBackIncompleteCharacters) {
  const auto bytes = byte_tokenizer();
  EXPECT_EQ(Pushed(StreamDecoder(bytes), bytes->encode("a\u00e9\U0001f600")),
            (Pieces{"a", "", "\u00e9", "", "", "", "\U0001f600", ""}));
  // The bytes E2 82 begin a UTF-8 character that the text never completes.
  EXPECT_EQ(Pushed(StreamDecoder(bytes), bytes->encode("\xe2\x82z")),
            (Pieces{"", "", "\xe2\x82z", ""}));
  EXPECT_EQ(Pushed(StreamDecoder(bytes), bytes->encode("\xf0\x9f")), (Pieces{"", "", "\xf0\x9f"}));
}

TEST(StreamDecoder, ReturnsInvalidBytesWithTheNextCharacter) {
  const auto bytes = byte_tokenizer();
  EXPECT_EQ(Pushed(StreamDecoder(bytes), bytes->encode("\xf0\x9f\u20ac")),
            (Pieces{"", "", "", "", "\xf0\x9f\u20ac", ""}));
  const auto replacing = std::make_shared<ReplacingBytes>();
  EXPECT_EQ(Pushed(StreamDecoder(replacing), replacing->encode("\xf0\x9f\u20ac")),
            (Pieces{"", "", "", "", "\ufffd\ufffd\u20ac", ""}));
}

TEST(StreamDecoder, SkipsTokensWithoutText) {
  nlohmann::json json = testing::ByteFallbackJson();
  const std::int64_t mark = 262;
  json["added_tokens"] = {{{"id", mark}, {"content", "<s>"}, {"special", true}}};
  const auto tokenizer = testing::Open(json);
  const std::int64_t word = 260;  // the token "▁a"
  const std::vector<std::int64_t> marks(9, mark);
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.push(word), "a");
  for (const std::int64_t token : marks) {
    EXPECT_EQ(decoder.push(token), "");
  }
  EXPECT_EQ(decoder.push(word), " a");
  std::vector<std::int64_t> before{word};
  before.insert(before.end(), marks.begin(), marks.end());
  EXPECT_EQ(StreamDecoder(tokenizer, before).push(word), " a");
}

TEST(StreamDecoder, SkipsIdsBeyondTheVocabulary) {
  const auto tokenizer = testing::Open(testing::ByteFallbackJson());
  const std::int64_t word = 260;  // the token "▁a"
  const std::int64_t beyond = tokenizer->vocabulary();
  EXPECT_EQ(Pushed(StreamDecoder(tokenizer, {beyond}), {word, beyond, word, beyond + 100}),
            (Pieces{"a", "", " a", "", ""}));
  EXPECT_ERROR(StreamDecoder(tokenizer).push(-1), "-1");
  // If the StreamDecoder's constructor gets earlier tokens, the first word keeps its leading space.
  EXPECT_EQ(Pushed(StreamDecoder(tokenizer, {word}), {word}), (Pieces{" a", ""}));
}

TEST(StreamDecoder, KeepsSpaceTokensAfterText) {
  const auto tokenizer = std::make_shared<StrippingBytes>();
  EXPECT_EQ(Pushed(StreamDecoder(tokenizer), tokenizer->encode(" a # b")),
            (Pieces{"", "a", " ", "", " ", "b", ""}));
  const std::string gap(30, ' ');
  const auto joined = [&](const std::string& before, const std::string& text) {
    return Joined(StreamDecoder(tokenizer, tokenizer->encode(before)), tokenizer->encode(text));
  };
  EXPECT_EQ(joined("", "a" + gap + "b" + gap), "a" + gap + "b" + gap);
  EXPECT_EQ(joined("a" + gap, gap + "b"), gap + "b");
  EXPECT_EQ(joined(gap, gap + "b"), "b");
}

TEST(StreamDecoder, PiecesJoinToTheWholeText) {
  const auto tokenizer = testing::Open(testing::ByteFallbackJson());
  std::string text;
  for (int i = 0; i < 50; ++i) {
    text += "a \u00e9b  \U0001f600a\n";
  }
  EXPECT_EQ(Joined(StreamDecoder(tokenizer), tokenizer->encode(text)), text);
}

}  // namespace
}  // namespace tessera::data
