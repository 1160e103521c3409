// Byte-pair encoding (Sennrich et al., 2016).

#pragma once

#include "steps.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// Two adjacent tokens that become one token; merges with lower ranks are applied first.
struct Merge {
  TokenId left = 0;
  TokenId right = 0;
  TokenId result = 0;
  std::uint32_t rank = 0;
};

/// A byte-pair model. The default values fit the tiktoken format.
struct BpeModel {
  Vocabulary vocabulary;  ///< token texts: raw bytes if byte_level, else UTF-8
  std::vector<Merge> merges;
  bool byte_level = true;      ///< words are split into bytes; else into characters
  bool byte_fallback = false;  ///< characters without a token become tokens <0xHH>
  bool ignore_merges = true;   ///< a word that is itself a token is not split
  bool fuse_unknown = false;   ///< adjacent characters without a token become one unknown token
  std::optional<TokenId> unknown;
};

/// The largest allowed token id: eight times the largest known vocabulary.
inline constexpr TokenId kMaxTokenId = 2'000'000;

struct BpeTokenizerParts {
  std::vector<AddedToken> added;
  Normalizers normalizers;
  PreTokenizers pre_tokenizers;
  BpeModel model;
  Decoders decoders;
  std::vector<std::string> texts;  ///< token texts by id, before the decoders; "" for an id without
                                   ///< a token
  bool joined_by_spaces = false;   ///< without decoders: whether token texts are joined by spaces
  std::vector<std::int64_t> begin_tokens;
  std::optional<bool> begins_texts;  ///< whether texts begin with begin_tokens; nullopt: unknown
  std::vector<std::int64_t> end_tokens;
};

TokenizerPtr bpe_tokenizer(BpeTokenizerParts parts);

}  // namespace tessera::data
