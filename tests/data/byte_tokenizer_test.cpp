#include <gtest/gtest.h>

#include "tessera/data/tokenizer.h"
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
}

TEST(ByteTokenizer, RefusesWhatIsNotAByte) {
  EXPECT_ERROR(byte_tokenizer()->decode({256}), "token 256");
  EXPECT_ERROR(byte_tokenizer()->decode({-1}), "token -1");
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
/// Its texts end with as many tokens as the test says.
class EndsWith final : public Tokenizer {
 public:
  explicit EndsWith(std::vector<std::int64_t> end) : end_(std::move(end)) {}
  std::int64_t vocabulary() const override { return 10; }
  std::vector<std::int64_t> encode(std::string_view) const override { return {}; }
  std::string decode(const std::vector<std::int64_t>&) const override { return {}; }
  std::vector<std::int64_t> end_tokens() const override { return end_; }

 private:
  std::vector<std::int64_t> end_;
};

TEST(Tokenizer, SaysItsOneTokenAsInTheFirstVersion) {
  EXPECT_EQ(EndsWith({7}).begin_token(), std::nullopt);
  EXPECT_EQ(EndsWith({7}).end_token(), 7);
  EXPECT_ERROR(EndsWith({7, 8}).end_token(), "the one token that ends a text was asked for",
               "there are 2", "end_tokens()");
}
#pragma GCC diagnostic pop

}  // namespace
}  // namespace tessera::data
