#include "bpe/bpe_tokenizer.h"

#include "pipeline/replacement.h"
#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data {

BpeTokenizer::BpeTokenizer(BpeTokenizerParts parts)
    : parts_(std::move(parts)), special_(parts_.texts.size()), bpe_(std::move(parts_.model)) {
  std::vector<AddedToken> raw;
  std::vector<AddedToken> normalized;
  for (AddedToken& token : parts_.added) {
    special_[token.id] = token.special;
    if (token.normalized) {
      token.content = normalize(token.content);
    }
    TESSERA_CHECK(token.content.size() <= kMaxAddedTokenBytes, "the added token of id ", token.id,
                  " has ", token.content.size(), " bytes; at most ", kMaxAddedTokenBytes,
                  " are looked for");
    if (!token.content.empty()) {
      (token.normalized ? normalized : raw).push_back(token);
    }
  }
  raw_ = AddedTokens(std::move(raw));
  normalized_ = AddedTokens(std::move(normalized));
}

std::string BpeTokenizer::normalize(std::string_view text) const {
  std::string out(text);
  for (const auto& step : parts_.normalizers) {
    step->apply(out);
    check_growth(text.size(), out.size());
  }
  return out;
}

std::vector<std::int64_t> BpeTokenizer::encode(std::string_view text) const {
  std::vector<std::int64_t> ids;
  std::unique_ptr<BpeWorkspace> workspace = workspaces_.take();
  const auto on_token = [&](TokenId id) { ids.push_back(id); };
  const auto on_word = [&](Piece word) { bpe_.encode(word.text, ids, *workspace); };
  std::string valid;
  raw_.split(
      replace_invalid_utf8(text, valid),
      [&](std::string_view part, bool first) {
        // Without a normalizer there is nothing to copy.
        const std::string copy = parts_.normalizers.empty() ? "" : normalize(part);
        normalized_.split(
            parts_.normalizers.empty() ? part : copy,
            [&](std::string_view piece, bool first_of_part) {
              parts_.pre_tokenizers.split({piece, first && first_of_part}, on_word);
            },
            on_token);
      },
      on_token);
  workspaces_.give(std::move(workspace));
  return ids;
}

std::string BpeTokenizer::decode(const std::vector<std::int64_t>& tokens) const {
  std::vector<std::string> texts;
  texts.reserve(tokens.size());
  for (const auto token : tokens) {
    TESSERA_CHECK(token >= 0 && token < vocabulary(), "token ", token,
                  " is outside the tokenizer's vocabulary of ", vocabulary(),
                  ": decode with the tokenizer that made it");
    const auto id = static_cast<std::size_t>(token);
    if (!special_[id] && !parts_.texts[id].empty()) {
      texts.push_back(parts_.texts[id]);
    }
  }
  for (const auto& step : parts_.decoders) {
    step->apply(texts);
  }
  std::string text;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    text += i > 0 && parts_.joined_by_spaces ? " " : "";
    text += texts[i];
  }
  return text;
}

std::unique_ptr<BpeWorkspace> BpeTokenizer::Workspaces::take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    return std::make_unique<BpeWorkspace>();
  }
  auto workspace = std::move(free_.back());
  free_.pop_back();
  return workspace;
}

void BpeTokenizer::Workspaces::give(std::unique_ptr<BpeWorkspace> workspace) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(workspace));
}

}  // namespace tessera::data
