#include "tokenizer_parts.h"

#include <algorithm>
#include <array>
#include <compare>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "unicode.h"

namespace tessera::data {
namespace {

/// SentencePiece's symbol for a space.
constexpr std::string_view kMark = "\xe2\x96\x81";

/// The merges of a BPE model. The key of a merge is pair_of() of the two merged tokens. Encoding
/// spends most of its time on look-ups here.
using Merges = std::unordered_map<std::uint64_t, Merge>;

std::uint64_t pair_of(TokenId left, TokenId right) {
  return std::uint64_t{left} << 32 | right;
}

/// Returns a map from a pair of tokens to its merge. If a pair has several merges, the last counts.
Merges by_pairs(const std::vector<Merge>& merges) {
  Merges by_pair;
  by_pair.reserve(merges.size());
  for (const Merge& merge : merges) {
    by_pair[pair_of(merge.left, merge.right)] = merge;
  }
  return by_pair;
}

struct Symbol {
  TokenId id = 0;
  std::uint32_t previous = 0;
  std::uint32_t next = 0;
  bool merged_away = false;
};

/// A possible merge of two adjacent tokens, ordered by the merge's rank, then by the position.
struct Candidate {
  std::uint64_t rank_and_position = 0;
  TokenId result = 0;
  auto operator<=>(const Candidate&) const = default;
};

/// Buffers and a word cache that encode() calls reuse, but never two calls at the same time.
struct Workspace {
  static constexpr std::size_t kCachedWords = std::size_t{1} << 15;
  /// The size of the longest word in the cache. Longer words rarely occur twice.
  static constexpr std::size_t kCachedBytes = 30;

  TextMap<std::vector<TokenId>> cache;
  std::vector<TokenId> ids;
  std::vector<Symbol> symbols;
  std::vector<Candidate> candidates;
};

/// Merges adjacent tokens of workspace.ids until no pair has a merge, the lowest rank first, then
/// the leftmost pair. Tokens are in a linked list, possible merges in a heap.
class HeapMerge {
 public:
  HeapMerge(const Merges& merges, Workspace& workspace)
      : merges_(merges),
        ids_(workspace.ids),
        symbols_(workspace.symbols),
        heap_(workspace.candidates) {}

  void run() {
    TESSERA_CHECK(ids_.size() < kNoSymbol, "a word of ", ids_.size(),
                  " characters is too long for a tokenizer; split the text, and encode each piece");
    const auto count = static_cast<std::uint32_t>(ids_.size());
    symbols_.clear();
    heap_.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
      symbols_.push_back(
          {ids_[i], i == 0 ? kNoSymbol : i - 1, i + 1 == count ? kNoSymbol : i + 1, false});
    }
    for (std::uint32_t i = 0; i + 1 < count; ++i) {
      push(i);
    }
    while (!heap_.empty()) {
      std::ranges::pop_heap(heap_, std::greater());
      const Candidate top = heap_.back();
      heap_.pop_back();
      const auto at = static_cast<std::uint32_t>(top.rank_and_position);
      if (!symbols_[at].merged_away && candidate_at(at) == top) {
        merge(at, top.result);
      }
    }
    ids_.clear();
    for (const Symbol& symbol : symbols_) {
      if (!symbol.merged_away) {
        ids_.push_back(symbol.id);
      }
    }
  }

 private:
  static constexpr std::uint32_t kNoSymbol = ~std::uint32_t{0};

  std::optional<Candidate> candidate_at(std::uint32_t at) const {
    const Symbol& symbol = symbols_[at];
    if (symbol.next == kNoSymbol) {
      return std::nullopt;
    }
    const auto merge = merges_.find(pair_of(symbol.id, symbols_[symbol.next].id));
    if (merge == merges_.end()) {
      return std::nullopt;
    }
    return Candidate{std::uint64_t{merge->second.rank} << 32 | at, merge->second.result};
  }

  void merge(std::uint32_t at, TokenId result) {
    Symbol& symbol = symbols_[at];
    Symbol& right = symbols_[symbol.next];
    symbol.id = result;
    symbol.next = right.next;
    right.merged_away = true;
    if (symbol.next != kNoSymbol) {
      symbols_[symbol.next].previous = at;
      push(at);
    }
    if (symbol.previous != kNoSymbol) {
      push(symbol.previous);
    }
  }

  void push(std::uint32_t at) {
    if (const auto candidate = candidate_at(at)) {
      heap_.push_back(*candidate);
      std::ranges::push_heap(heap_, std::greater());
    }
  }

  const Merges& merges_;
  std::vector<TokenId>& ids_;
  std::vector<Symbol>& symbols_;
  std::vector<Candidate>& heap_;
};

/// Splits words into tokens with byte-pair merges. Immutable.
class Bpe {
 public:
  explicit Bpe(BpeModel model) : model_(std::move(model)), merges_(by_pairs(model_.merges)) {
    for (const auto& [text, id] : model_.vocabulary) {
      if (const auto byte = byte_of_fallback_token(text); byte && model_.byte_fallback) {
        fallback_[*byte] = id;
      }
    }
    find_inner_borders();
  }

  /// Appends the tokens of a non-empty word to `ids`. Unless the model's tokens are bytes, the word
  /// must be valid UTF-8.
  void encode(std::string_view word, std::vector<std::int64_t>& ids, Workspace& workspace) const {
    while (!word.empty()) {
      const std::size_t end = divisible_ ? next_border(word) : word.size();
      const std::string_view part = word.substr(0, end);
      word.remove_prefix(end);
      if (const auto cached = workspace.cache.find(part); cached != workspace.cache.end()) {
        ids.insert(ids.end(), cached->second.begin(), cached->second.end());
        continue;
      }
      merge_word(part, workspace);
      ids.insert(ids.end(), workspace.ids.begin(), workspace.ids.end());
      if (part.size() <= Workspace::kCachedBytes) {
        if (workspace.cache.size() == Workspace::kCachedWords) {
          workspace.cache.clear();
        }
        workspace.cache.emplace(part, workspace.ids);
      }
    }
  }

 private:
  /// Prepares next_border(), which cuts words before space symbols. There is no cut where a token
  /// contains a character and the following space symbol, because a merge could join both.
  void find_inner_borders() {
    std::unordered_set<TokenId> fallen_back;
    for (const auto& id : fallback_) {
      if (id) {
        fallen_back.insert(*id);
      }
    }
    divisible_ = !model_.byte_level && !model_.ignore_merges &&
                 fallen_back.size() == fallback_.size() &&
                 std::ranges::none_of(model_.merges, [&](const Merge& merge) {
                   return fallen_back.contains(merge.left) || fallen_back.contains(merge.right);
                 });
    for (const auto& [text, id] : model_.vocabulary) {
      for (std::size_t at = text.find(kMark, 1); divisible_ && at != std::string::npos;
           at = text.find(kMark, at + 1)) {
        before_mark_.emplace(last_character(std::string_view(text).substr(0, at)));
      }
    }
  }

  std::size_t next_border(std::string_view text) const {
    std::size_t at = text.find(kMark, 1);
    while (at != std::string::npos &&
           before_mark_.contains(std::string(last_character(text.substr(0, at))))) {
      at = text.find(kMark, at + 1);
    }
    return std::min(at, text.size());
  }

  void merge_word(std::string_view word, Workspace& workspace) const {
    const auto whole = model_.vocabulary.find(word);
    if (model_.ignore_merges && whole != model_.vocabulary.end()) {
      workspace.ids.assign(1, whole->second);
      return;
    }
    workspace.ids.clear();
    first_symbols(word, workspace.ids);
    HeapMerge(merges_, workspace).run();
  }

  /// Sets `ids` to the tokens of a word before the first merge. As in the `tokenizers` package, an
  /// unknown token comes after the byte-fallback tokens of directly following characters.
  void first_symbols(std::string_view word, std::vector<TokenId>& ids) const {
    bool unknown = false;  // whether an unknown token must be appended before the next token
    while (!word.empty()) {
      const std::string_view character =
          word.substr(0, model_.byte_level ? 1 : first_character(word).bytes);
      word.remove_prefix(character.size());
      if (const auto token = model_.vocabulary.find(character); token != model_.vocabulary.end()) {
        if (std::exchange(unknown, false)) {
          ids.push_back(*model_.unknown);
        }
        ids.push_back(token->second);
      } else if (!append_fallback(character, ids)) {
        TESSERA_CHECK(model_.unknown, "the tokenizer has no token for '", printable(character),
                      "' and no unknown token; use a tokenizer that covers the text");
        if (unknown && !model_.fuse_unknown) {
          ids.push_back(*model_.unknown);
        }
        unknown = true;
      }
    }
    if (unknown) {
      ids.push_back(*model_.unknown);
    }
  }

  bool append_fallback(std::string_view character, std::vector<TokenId>& ids) const {
    const auto token = [&](char byte) { return fallback_[static_cast<unsigned char>(byte)]; };
    const bool covered =
        std::ranges::all_of(character, [&](char byte) { return token(byte).has_value(); });
    for (std::size_t i = 0; covered && i < character.size(); ++i) {
      ids.push_back(*token(character[i]));
    }
    return covered;
  }

  BpeModel model_;
  Merges merges_;
  std::array<std::optional<TokenId>, 256> fallback_;  ///< ids of the byte-fallback tokens <0xHH>
  bool divisible_ = false;  ///< whether words can be cut before space symbols
  std::unordered_set<std::string> before_mark_;
};

/// A tokenizer with a BPE model. Encoding has four steps: added tokens, normalization, splitting
/// into words, and byte-pair merges.
class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeTokenizerParts parts)
      : parts_(std::move(parts)), special_(parts_.texts.size()), bpe_(std::move(parts_.model)) {
    std::vector<AddedToken> raw;
    std::vector<AddedToken> normalized;
    for (AddedToken& token : parts_.added) {
      special_[token.id] = token.special;
      if (token.normalized) {
        token.content = normalize(token.content);
      }
      if (!token.content.empty()) {
        (token.normalized ? normalized : raw).push_back(token);
      }
    }
    raw_ = AddedTokens(raw);
    normalized_ = AddedTokens(normalized);
  }

  std::int64_t vocabulary() const override { return std::ssize(parts_.texts); }
  std::vector<std::int64_t> begin_tokens() const override { return parts_.begin_tokens; }
  std::vector<std::int64_t> end_tokens() const override { return parts_.end_tokens; }
  std::optional<bool> begins_texts() const override { return parts_.begins_texts; }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    std::vector<std::int64_t> ids;
    std::unique_ptr<Workspace> workspace = take_workspace();
    const auto on_token = [&](TokenId id) { ids.push_back(id); };
    const auto on_word = [&](Piece word) { bpe_.encode(word.text, ids, *workspace); };
    const auto on_part = [&](std::string_view part, bool first) {
      const std::string copy = parts_.normalizers.empty() ? "" : normalize(part);
      const auto on_text = [&](std::string_view piece, bool first_of_part) {
        parts_.pre_tokenizers.split({piece, first && first_of_part}, on_word);
      };
      normalized_.split(parts_.normalizers.empty() ? part : copy, on_text, on_token);
    };
    std::string valid;
    raw_.split(replace_invalid_utf8(text, valid), on_part, on_token);
    const std::lock_guard lock(mutex_);
    workspaces_.push_back(std::move(workspace));
    return ids;
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::vector<std::string> texts;
    texts.reserve(tokens.size());
    for (const auto token : tokens) {
      TESSERA_CHECK(token >= 0 && token < vocabulary(), "token ", token,
                    " is outside the tokenizer's vocabulary of ", vocabulary(),
                    " tokens; decode with the tokenizer that encoded the text");
      const auto id = static_cast<std::size_t>(token);
      if (!special_[id] && !parts_.texts[id].empty()) {
        texts.push_back(parts_.texts[id]);
      }
    }
    for (const auto& step : parts_.decoders) {
      step(texts);
    }
    std::string text;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      text += i > 0 && parts_.joined_by_spaces ? " " : "";
      text += texts[i];
    }
    return text;
  }

 private:
  std::string normalize(std::string_view text) const {
    std::string out(text);
    for (const auto& step : parts_.normalizers) {
      step(out);
      check_growth(text.size(), out.size());
    }
    return out;
  }

  std::unique_ptr<Workspace> take_workspace() const {
    const std::lock_guard lock(mutex_);
    if (workspaces_.empty()) {
      return std::make_unique<Workspace>();
    }
    auto workspace = std::move(workspaces_.back());
    workspaces_.pop_back();
    return workspace;
  }

  BpeTokenizerParts parts_;
  AddedTokens raw_;         ///< added tokens to find in the original text
  AddedTokens normalized_;  ///< added tokens to find in the normalized text
  std::vector<bool> special_;
  Bpe bpe_;
  /// A pool of Workspaces. Concurrent encode() calls use different Workspaces. A later call reuses
  /// a Workspace of an earlier call, with the word cache.
  mutable std::vector<std::unique_ptr<Workspace>> workspaces_;
  mutable std::mutex mutex_;
};

}  // namespace

TokenizerPtr bpe_tokenizer(BpeTokenizerParts parts) {
  return std::make_shared<BpeTokenizer>(std::move(parts));
}

}  // namespace tessera::data
