// SentencePiece models, where the library was found (TESSERA_SENTENCEPIECE, set in CMakeLists.txt
// for this file alone). Without it the same function says what to install.

#ifdef TESSERA_SENTENCEPIECE
#include <sentencepiece_processor.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/input_file.h"
#include "tokenizer/files_beside.h"
#include "unicode/utf8.h"

namespace tessera::data {

TokenizerPtr sentencepiece_tokenizer(const std::string& path) {
  return sentencepiece_tokenizer(path, {});
}

#ifdef TESSERA_SENTENCEPIECE
namespace {

using sentencepiece::SentencePieceProcessor;

/// Ten times the largest that are known.
constexpr std::uint64_t kMaxModelBytes = 100'000'000;

/// As a field of a model's protobuf: normalizer_spec { add_dummy_prefix: false }. Behind a model it
/// is joined with the normalizer_spec that is there.
constexpr std::string_view kNoPrefix{"\x1a\x02\x18\x00", 4};

constexpr std::string_view kSpace = "\xe2\x96\x81";

/// The library's error for a model: from its status or, for some faults, from an exception.
std::string load(SentencePieceProcessor& processor, const std::string& model) {
  try {
    const auto status = processor.LoadFromSerializedProto(model);
    return status.ok() ? "" : printable(status.ToString());
  } catch (const std::exception& error) {
    return error.what();
  }
}

// -1 says that a model has no such token.
std::vector<std::int64_t> present(int id) {
  return id < 0 ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{id};
}

/// Special and added tokens are found in the text, as transformers' LlamaTokenizer does; the pieces
/// between them are the library's, whose calls are const and safe for several threads.
class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(const std::string& path, const FilesBeside& beside)
      : begins_texts_(beside.adds_begin) {
    std::string model =
        files::read_file(path, "a SentencePiece model (tokenizer.model)", kMaxModelBytes);
    const std::string fault = load(processor_, model);
    TESSERA_CHECK(fault.empty(), "'", path, "' is not a SentencePiece model (", fault,
                  "): give a tokenizer.model");
    model += kNoPrefix;
    TESSERA_CHECK(load(within_, model).empty(), "'", path,
                  "' can't be read without its prefix; give another tokenizer.model");
    legacy_ = beside.legacy;
    prefix_ = legacy_ || beside.prefix;
    add_tokens(beside);
    begin_ = beside.begin ? std::vector{id_of(*beside.begin)} : present(processor_.bos_id());
    end_ = beside.end ? std::vector{id_of(*beside.end)} : present(processor_.eos_id());
  }

  std::int64_t vocabulary() const override {
    return processor_.GetPieceSize() + static_cast<std::int64_t>(behind_.size());
  }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    std::vector<std::int64_t> all;
    // The library itself would make one U+FFFD of each byte.
    std::string valid;
    added_.split(
        replace_invalid_utf8(text, valid),
        [&](std::string_view part, bool first) {
          const std::vector<int> ids =
              (first && prefix_) || legacy_ ? pieces_of(processor_, part) : pieces_within(part);
          all.insert(all.end(), ids.begin(), ids.end());
        },
        [&](TokenId id) {
          // transformers takes a space alone, before a special token, for a prefix.
          if (!prefix_ && all.size() == 1 && special_.contains(id) && is_space(all[0])) {
            all.clear();
          }
          all.push_back(id);
        });
    return all;
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    std::vector<int> pieces;
    for (const auto token : tokens) {
      TESSERA_CHECK(token >= 0 && token < vocabulary(), "token ", token,
                    " is outside the tokenizer's vocabulary of ", vocabulary(),
                    ": decode with the tokenizer that made it");
      if (token < processor_.GetPieceSize()) {
        pieces.push_back(static_cast<int>(token));
        continue;
      }
      decode_pieces(std::exchange(pieces, {}), text);
      text += behind_[static_cast<std::size_t>(token - processor_.GetPieceSize())];
    }
    decode_pieces(pieces, text);
    return text;
  }

  std::vector<std::int64_t> begin_tokens() const override { return begin_; }
  std::vector<std::int64_t> end_tokens() const override { return end_; }
  std::optional<bool> begins_texts() const override { return begins_texts_; }

 private:
  /// Those of the model itself, and those that the files beside it name.
  void add_tokens(const FilesBeside& beside) {
    std::vector<AddedToken> tokens;
    for (const int id : {processor_.unk_id(), processor_.bos_id(), processor_.eos_id()}) {
      if (id >= 0) {
        tokens.push_back({.content = processor_.IdToPiece(id), .id = static_cast<TokenId>(id)});
        ids_[tokens.back().content] = id;
        special_.insert(id);
      }
    }
    for (const NamedToken& named : beside.tokens) {
      const std::string& content = named.token.content;
      const bool is_known = ids_.contains(content);
      const std::int64_t id = id_of(content);
      TESSERA_CHECK(!named.id || *named.id == id, "the files beside the tokenizer give '",
                    printable(content), "' the id ", named.id.value_or(0), ", but it is ", id,
                    ": make them agree");
      if (id == vocabulary()) {
        behind_.push_back(named.token.special ? "" : content);
      }
      if (!is_known && !content.empty()) {
        ids_[content] = id;
        tokens.push_back(named.token);
        tokens.back().id = static_cast<TokenId>(id);
      }
    }
    added_ = AddedTokens(std::move(tokens));
  }

  bool is_space(std::int64_t id) const {
    return id < processor_.GetPieceSize() && processor_.IdToPiece(static_cast<int>(id)) == kSpace;
  }

  /// The id of a token's text, which may be new: then the next.
  std::int64_t id_of(const std::string& content) const {
    if (const auto known = ids_.find(content); known != ids_.end()) {
      return known->second;
    }
    const int id = processor_.PieceToId(content);
    return processor_.IdToPiece(id) == content ? id : vocabulary();
  }

  static std::vector<int> pieces_of(const SentencePieceProcessor& processor,
                                    std::string_view text) {
    std::vector<int> ids;
    const auto status = processor.Encode(text, &ids);
    TESSERA_CHECK(status.ok(),
                  "SentencePiece cannot encode the text: ", printable(status.ToString()));
    return ids;
  }

  /// Encodes a part that is not the first. The library drops a space before a text; transformers
  /// keeps it by a token before it, whose own pieces are left out.
  std::vector<int> pieces_within(std::string_view part) const {
    if (!part.starts_with(' ') && !part.starts_with(kSpace)) {
      return pieces_of(within_, part);
    }
    const std::string unknown = processor_.IdToPiece(processor_.unk_id());
    const auto length = pieces_of(within_, unknown).size();
    std::vector<int> ids = pieces_of(within_, unknown + std::string(part));
    ids.erase(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(std::min(length, ids.size())));
    return ids;
  }

  void decode_pieces(const std::vector<int>& pieces, std::string& text) const {
    std::string some;
    const auto status =
        ((prefix_ && text.empty()) || legacy_ ? processor_ : within_).Decode(pieces, &some);
    TESSERA_CHECK(status.ok(),
                  "SentencePiece cannot decode the tokens: ", printable(status.ToString()));
    text += some;
  }

  SentencePieceProcessor processor_;
  SentencePieceProcessor within_;  ///< which begins no text with a space
  bool legacy_ = true;             ///< each part of a text between special tokens gets one
  bool prefix_ = true;             ///< the first part gets one
  AddedTokens added_;
  std::set<std::int64_t> special_;           ///< the model's own
  std::map<std::string, std::int64_t> ids_;  ///< of the tokens in added_
  std::vector<std::string> behind_;          ///< texts of those behind the model's own
  std::vector<std::int64_t> begin_, end_;
  std::optional<bool> begins_texts_;
};

}  // namespace

TokenizerPtr sentencepiece_tokenizer(const std::string& path, const FilesBeside& beside) {
  return std::make_shared<SentencePieceTokenizer>(path, beside);
}

#else
TokenizerPtr sentencepiece_tokenizer(const std::string& path, const FilesBeside& /*beside*/) {
  fail("cannot read the tokenizer '", path,
       "': Tessera was built without SentencePiece: install libsentencepiece-dev and build again");
}
#endif

}  // namespace tessera::data
