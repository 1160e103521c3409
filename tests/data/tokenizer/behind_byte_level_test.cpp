// Pre-tokenizers behind ByteLevel, which see the characters that stand for bytes.
#include <gtest/gtest.h>

#include "data/tokenizer/small_tokenizers.h"
#include "testing/errors.h"

namespace tessera::data {
namespace {

using Ids = std::vector<std::int64_t>;
using nlohmann::json;

/// As ByteLevelJson(), with these steps behind ByteLevel, and tokens for the bytes C2, B2 and "1".
json WithStepsBehind(const std::vector<json>& steps) {
  json all = testing::ByteLevelJson();
  for (const json& step : steps) {
    all["pre_tokenizer"]["pretokenizers"].push_back(step);
  }
  all["model"]["vocab"].update({{"\u00c2", 8}, {"\u00b2", 9}, {"\u00c2\u00b2", 10}, {"1", 11}});
  all["model"]["vocab"].update({{"\u00b21", 12}, {"\u0120a", 13}});
  all["model"]["merges"] = {"\u00c2 \u00b2", "\u00b2 1", "\u0120 a"};
  return all;
}

// U+00B2 is C2 B2 in UTF-8, and the byte B2 stands for itself, which is a number.
TEST(BehindByteLevel, StepsSplitTheCharactersThatStandForBytes) {
  const auto encode = [](const std::vector<json>& steps) {
    return testing::Open(WithStepsBehind(steps))->encode("\u00b2\u00b21 a");
  };
  const json each = {{"type", "Digits"}, {"individual_digits", true}};
  const json runs = {{"type", "Digits"}};
  const json space = {
      {"type", "Split"}, {"pattern", {{"String", "\u0120"}}}, {"behavior", "Removed"}};
  EXPECT_EQ(encode({}), (Ids{10, 10, 11, 13}));
  EXPECT_EQ(encode({each}), (Ids{8, 9, 8, 9, 11, 13}));
  EXPECT_EQ(encode({runs}), (Ids{8, 9, 8, 12, 13}));
  EXPECT_EQ(encode({space, each}), (Ids{8, 9, 8, 9, 11, 0}));
}

TEST(BehindByteLevel, StepsThatMakeOtherCharactersAreRefused) {
  const json metaspace = {{"type", "Metaspace"}, {"replacement", "\u2581"}};
  EXPECT_ERROR(testing::Open(WithStepsBehind({metaspace})),
               R"("pre_tokenizer.pretokenizers[2]" is {"replacement":)",
               "it must be before ByteLevel");
  const json byte_level = {{"type", "ByteLevel"}};
  EXPECT_ERROR(testing::Open(WithStepsBehind({byte_level})),
               R"("pre_tokenizer.pretokenizers[2]" is {"type":"ByteLevel"})",
               "it must be the only ByteLevel");
}

}  // namespace
}  // namespace tessera::data
