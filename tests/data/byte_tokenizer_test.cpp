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

}  // namespace
}  // namespace tessera::data
