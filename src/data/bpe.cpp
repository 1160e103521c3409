#include "bpe.h"

#include <bit>

#include "tessera/core/error.h"
#include "unicode.h"

namespace tessera::data {

MergeTable::MergeTable(const std::vector<Merge>& merges) {
  // At most half full, so that searches are short.
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(2 * merges.size(), 16));
  slots_.resize(size);
  mask_ = size - 1;
  shift_ = 64 - std::countr_zero(size);
  for (const Merge& merge : merges) {
    const std::uint64_t key = key_of(merge.left, merge.right);
    std::size_t at = slot_of(key);
    while (slots_[at].key != kEmpty && slots_[at].key != key) {
      at = (at + 1) & mask_;
    }
    slots_[at] = {key, {merge.rank, merge.result}};
  }
}

namespace {

using Candidate = BpeWorkspace::Candidate;
using Symbol = BpeWorkspace::Symbol;

constexpr std::uint32_t kNoSymbol = ~std::uint32_t{0};

/// Symbols are a linked list, candidates a heap. Outdated candidates are skipped.
class HeapMerge {
 public:
  HeapMerge(const MergeTable& merges, BpeWorkspace& workspace)
      : merges_(merges), symbols_(workspace.symbols), heap_(workspace.candidates) {
    const auto count = static_cast<std::uint32_t>(workspace.ids.size());
    symbols_.clear();
    heap_.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
      symbols_.push_back({workspace.ids[i], i == 0 ? kNoSymbol : i - 1,
                          i + 1 == count ? kNoSymbol : i + 1, false});
    }
    for (std::uint32_t i = 0; i + 1 < count; ++i) {
      if (const auto candidate = candidate_at(i)) {
        heap_.push_back(*candidate);
      }
    }
    std::ranges::make_heap(heap_, later);
  }

  void run() {
    while (!heap_.empty()) {
      std::ranges::pop_heap(heap_, later);
      const Candidate top = heap_.back();
      heap_.pop_back();
      const auto at = static_cast<std::uint32_t>(top.rank_and_position);
      if (!symbols_[at].merged_away && still_holds(at, top)) {
        merge(at, top.result);
      }
    }
  }

  void write(std::vector<TokenId>& ids) const {
    ids.clear();
    for (const Symbol& symbol : symbols_) {
      if (!symbol.merged_away) {
        ids.push_back(symbol.id);
      }
    }
  }

 private:
  static bool later(const Candidate& a, const Candidate& b) {
    return a.rank_and_position > b.rank_and_position;
  }

  std::optional<Candidate> candidate_at(std::uint32_t at) const {
    const Symbol& symbol = symbols_[at];
    if (symbol.next == kNoSymbol) {
      return std::nullopt;
    }
    const MergedPair pair = merges_.find(symbol.id, symbols_[symbol.next].id);
    if (pair.rank == MergedPair::kNone) {
      return std::nullopt;
    }
    return Candidate{std::uint64_t{pair.rank} << 32 | at, pair.result};
  }

  bool still_holds(std::uint32_t at, const Candidate& candidate) const {
    const auto now = candidate_at(at);
    return now && now->rank_and_position == candidate.rank_and_position;
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
      std::ranges::push_heap(heap_, later);
    }
  }

  const MergeTable& merges_;
  std::vector<Symbol>& symbols_;
  std::vector<Candidate>& heap_;
};

}  // namespace

void merge_symbols(const MergeTable& merges, BpeWorkspace& workspace) {
  const std::size_t count = workspace.ids.size();
  TESSERA_CHECK(count < kNoSymbol, "a word of ", count,
                " characters is too long for a tokenizer: encode the text in parts");
  HeapMerge heap(merges, workspace);
  heap.run();
  heap.write(workspace.ids);
}

namespace {

/// SentencePiece's mark of a space.
constexpr std::string_view kMark = "\xe2\x96\x81";

}  // namespace

Bpe::Bpe(BpeModel model) : model_(std::move(model)), merges_(model_.merges) {
  for (const auto& [text, id] : model_.vocabulary) {
    if (text.size() == 1) {
      bytes_[static_cast<unsigned char>(text[0])] = id;
    }
    if (const auto byte = byte_of_fallback_token(text); byte && model_.byte_fallback) {
      fallback_[*byte] = id;
    }
  }
  find_inner_borders();
}

/// Without a pre-tokenizer the whole text is one word. It may be cut between two characters that
/// are neighbors in no token, since no merge crosses that place. Cuts before marks are enough, and
/// give words for the cache.
void Bpe::find_inner_borders() {
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
  if (!divisible_) {
    return;
  }
  for (const auto& [text, id] : model_.vocabulary) {
    for (std::size_t at = text.find(kMark, 1); at != std::string::npos;
         at = text.find(kMark, at + 1)) {
      before_mark_.emplace(last_character(std::string_view(text).substr(0, at)));
    }
  }
}

std::size_t Bpe::next_border(std::string_view text, std::size_t from) const {
  for (std::size_t at = text.find(kMark, from + 1); at != std::string::npos;
       at = text.find(kMark, at + 1)) {
    if (!before_mark_.contains(std::string(last_character(text.substr(0, at))))) {
      return at;
    }
  }
  return text.size();
}

void Bpe::encode(std::string_view word, std::vector<std::int64_t>& ids,
                 BpeWorkspace& workspace) const {
  if (!divisible_) {
    encode_part(word, ids, workspace);
    return;
  }
  for (std::size_t begin = 0; begin < word.size();) {
    const std::size_t end = next_border(word, begin);
    encode_part(word.substr(begin, end - begin), ids, workspace);
    begin = end;
  }
}

void Bpe::encode_part(std::string_view word, std::vector<std::int64_t>& ids,
                      BpeWorkspace& workspace) const {
  if (!WordCache::can_cache(word)) {
    merge_word(word, workspace);
    ids.insert(ids.end(), workspace.ids.begin(), workspace.ids.end());
    return;
  }
  WordCache::Entry& entry = workspace.cache.place(word);
  if (WordCache::holds(entry, word)) {
    ids.insert(ids.end(), entry.ids().begin(), entry.ids().end());
    return;
  }
  merge_word(word, workspace);
  WordCache::store(entry, word, workspace.ids);
  ids.insert(ids.end(), workspace.ids.begin(), workspace.ids.end());
}

void Bpe::merge_word(std::string_view word, BpeWorkspace& workspace) const {
  if (model_.ignore_merges) {
    if (const auto whole = model_.vocabulary.find(word); whole != model_.vocabulary.end()) {
      workspace.ids.assign(1, whole->second);
      return;
    }
  }
  workspace.ids.clear();
  first_symbols(word, workspace.ids);
  merge_symbols(merges_, workspace);
}

/// The order of unknown tokens and byte-fallback tokens is that of the `tokenizers` package.
void Bpe::first_symbols(std::string_view word, std::vector<TokenId>& ids) const {
  bool unknown = false;  // an unknown token is not appended yet
  while (!word.empty()) {
    const std::string_view character =
        word.substr(0, model_.byte_level ? 1 : first_character(word).bytes);
    word.remove_prefix(character.size());
    if (const auto token = token_of(character)) {
      if (std::exchange(unknown, false)) {
        ids.push_back(*model_.unknown);
      }
      ids.push_back(*token);
    } else if (!append_fallback(character, ids)) {
      TESSERA_CHECK(model_.unknown, "the tokenizer has no token for '", printable(character),
                    "' and none for what is unknown: use one that covers the text");
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

std::optional<TokenId> Bpe::token_of(std::string_view character) const {
  if (character.size() == 1) {
    return bytes_[static_cast<unsigned char>(character[0])];
  }
  const auto found = model_.vocabulary.find(character);
  return found == model_.vocabulary.end() ? std::nullopt : std::optional(found->second);
}

bool Bpe::append_fallback(std::string_view character, std::vector<TokenId>& ids) const {
  const auto token = [&](char byte) { return fallback_[static_cast<unsigned char>(byte)]; };
  if (!std::ranges::all_of(character, [&](char byte) { return token(byte).has_value(); })) {
    return false;
  }
  for (const char byte : character) {
    ids.push_back(*token(byte));
  }
  return true;
}

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
    step(out);
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
        // No copy without a normalizer.
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
    step(texts);
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
