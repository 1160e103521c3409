#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bpe/bpe.h"
#include "pipeline/added_tokens.h"
#include "pipeline/decoders.h"
#include "pipeline/normalizers.h"
#include "pipeline/pre_tokenizers.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// Ids are below this; the largest vocabularies have an eighth of it.
inline constexpr TokenId kMaxTokenId = 2'000'000;

/// What a byte-pair tokenizer is made of.
struct BpeTokenizerParts {
  std::vector<AddedToken> added;
  Normalizers normalizers;
  PreTokenizers pre_tokenizers;
  BpeModel model;
  Decoders decoders;
  std::vector<std::string> texts;  ///< by id, as the decoders want them; "" for an id without token
  bool joined_by_spaces = false;   ///< how texts are joined if there are no decoders
  std::vector<std::int64_t> begin_tokens;
  std::optional<bool> begins_texts;  ///< with them; not set: the files do not say
  std::vector<std::int64_t> end_tokens;
};

/// Added tokens, normalization, splitting, byte-pair encoding; and back.
class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeTokenizerParts parts);

  std::int64_t vocabulary() const override {
    return static_cast<std::int64_t>(parts_.texts.size());
  }
  std::vector<std::int64_t> encode(std::string_view text) const override;
  std::string decode(const std::vector<std::int64_t>& tokens) const override;
  std::vector<std::int64_t> begin_tokens() const override { return parts_.begin_tokens; }
  std::vector<std::int64_t> end_tokens() const override { return parts_.end_tokens; }
  std::optional<bool> begins_texts() const override { return parts_.begins_texts; }

 private:
  /// Lends workspaces to the threads that encode, so that what one has cached serves the next call.
  class Workspaces {
   public:
    std::unique_ptr<BpeWorkspace> take();
    void give(std::unique_ptr<BpeWorkspace> workspace);

   private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<BpeWorkspace>> free_;
  };

  std::string normalize(std::string_view text) const;

  BpeTokenizerParts parts_;
  AddedTokens raw_;            ///< looked for in the original text
  AddedTokens normalized_;     ///< looked for in the normalized text
  std::vector<bool> special_;  ///< by id
  Bpe bpe_;
  mutable Workspaces workspaces_;
};

}  // namespace tessera::data
