// Tokenizers of SentencePiece models. The SentencePiece library encodes and decodes pieces; special
// tokens and spaces are handled as in `transformers`.

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "piece_model.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/data/detail/tokenizers.h"
#include "tessera/version.h"
#include "tokenizer_parts.h"
#include "unicode.h"

namespace tessera::data {
namespace {

constexpr auto kLibrary = "libtessera_sentencepiece.so." TESSERA_SOVERSION;

/// Returns the flags for dlopen(). With RTLD_DEEPBIND, SentencePiece finds its own symbols first.
/// AddressSanitizer does not allow RTLD_DEEPBIND.
int scope_of_names() {
  const bool sanitized = dlsym(RTLD_DEFAULT, "__asan_init") != nullptr;
  return sanitized ? RTLD_LOCAL : RTLD_LOCAL | RTLD_DEEPBIND;
}

LoadPieceModel load_library() {
  const std::string path =
      detail::library_beside(reinterpret_cast<const void*>(&load_library), kLibrary);
  // The library is never unloaded, because its models can live until the process ends.
  void* const library = dlopen(path.c_str(), RTLD_NOW | scope_of_names());
  TESSERA_CHECK(library != nullptr, "a SentencePiece model (tokenizer.model) was passed, but ",
                kLibrary, " cannot be loaded: ", dlerror(),
                "; install libsentencepiece-dev and build Tessera again");
  const auto function = reinterpret_cast<LoadPieceModel>(dlsym(library, kLoadPieceModel));
  TESSERA_CHECK(function != nullptr, path,
                " belongs to another version of Tessera; install all libraries from one build");
  return function;
}

/// Loads a SentencePiece model with libtessera_sentencepiece.so. Throws Error if Tessera was built
/// without SentencePiece.
std::unique_ptr<PieceModel> load_piece_model(const std::string& model, std::string& fault) {
  // If load_library() throws an exception, the next call of load_piece_model() tries again.
  static const LoadPieceModel load = load_library();
  return std::unique_ptr<PieceModel>(load(model, fault));
}

/// Maximum size of a SentencePiece model file: ten times the largest known model.
constexpr std::uint64_t kMaxModelBytes = 100'000'000;

/// The protobuf field normalizer_spec { add_dummy_prefix: false }. If these bytes are appended to a
/// model, protobuf merges them into the model's normalizer_spec.
constexpr std::string_view kNoPrefix{"\x1a\x02\x18\x00", 4};

constexpr std::string_view kSpaceMark = "\xe2\x96\x81";

/// Finds special and added tokens in the text as LlamaTokenizer in `transformers` does. The
/// SentencePiece library, whose const functions are thread safe, encodes the text between tokens.
class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(const std::string& path, const TokenizerSettings& settings)
      : begins_texts_(settings.begin.adds) {
    const std::string model =
        files::read_file(path, "a SentencePiece model (tokenizer.model)", kMaxModelBytes);
    std::string fault;
    model_ = load_piece_model(model, fault);
    TESSERA_CHECK(model_ != nullptr, "'", path, "' is not a SentencePiece model (",
                  printable(fault), "); pass a tokenizer.model");
    within_ = load_piece_model(model + std::string(kNoPrefix), fault);
    TESSERA_CHECK(within_ != nullptr, "'", path,
                  "' cannot be loaded with add_dummy_prefix=false; pass another tokenizer.model");
    legacy_ = settings.legacy;
    TESSERA_CHECK(legacy_ || settings.prefix.value_or(true), "the files next to '", path,
                  "' set \"legacy\": false and \"add_prefix_space\": false, which is not "
                  "implemented together; use a tokenizer.json");
    add_tokens(settings);
    begin_ = tokens_of(settings.begin, model_->id_of_begin());
    end_ = tokens_of(settings.end, model_->id_of_end());
  }

  std::int64_t vocabulary() const override {
    return model_->size() + static_cast<std::int64_t>(behind_.size());
  }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    std::vector<std::int64_t> all;
    // Invalid UTF-8 is replaced before encoding, because the SentencePiece library would replace
    // each invalid byte by a separate U+FFFD.
    std::string valid;
    added_.split(
        replace_invalid_utf8(text, valid),
        [&](std::string_view part, bool first) {
          const std::vector<int> ids =
              first || legacy_ ? pieces_of(*model_, part) : pieces_within(part);
          all.insert(all.end(), ids.begin(), ids.end());
        },
        [&](TokenId id) {
          if (all.empty() && !legacy_ && !special_.contains(id)) {
            // LlamaTokenizer puts a space before the text, and drops it before a special token.
            const std::vector<int> space = pieces_within(" ");
            all.assign(space.begin(), space.end());
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
                    " tokens; decode with the tokenizer that encoded the text");
      // Special tokens have no text, and the pieces around a special token are decoded together.
      if (special_.contains(token)) {
        continue;
      }
      if (token < model_->size()) {
        pieces.push_back(static_cast<int>(token));
        continue;
      }
      decode_pieces(std::exchange(pieces, {}), text);
      text += behind_[static_cast<std::size_t>(token - model_->size())];
    }
    decode_pieces(pieces, text);
    return text;
  }

  std::vector<std::int64_t> begin_tokens() const override { return begin_; }
  std::vector<std::int64_t> end_tokens() const override { return end_; }
  std::optional<bool> begins_texts() const override { return begins_texts_; }

 private:
  /// Adds the special tokens of the model, and the tokens in the files next to the model, to the
  /// tokens that encode() searches for in texts.
  void add_tokens(const TokenizerSettings& settings) {
    std::vector<AddedToken> tokens;
    for (const int id : {model_->id_of_unknown(), model_->id_of_begin(), model_->id_of_end()}) {
      if (id >= 0) {
        tokens.push_back({.content = model_->piece(id), .id = static_cast<TokenId>(id)});
        ids_[tokens.back().content] = id;
        special_.insert(id);
      }
    }
    for (const NamedToken& named : settings.tokens) {
      const std::string& content = named.token.content;
      const bool is_known = ids_.contains(content);
      const std::int64_t id = id_of(content);
      const bool is_new = id == vocabulary();
      check_id(named, id, is_new);
      if (is_new) {
        behind_.push_back(content);
      }
      if (named.token.special) {
        special_.insert(id);
      }
      if (!is_known && !content.empty()) {
        ids_[content] = id;
        tokens.push_back(named.token);
        tokens.back().id = static_cast<TokenId>(id);
      }
    }
    added_ = AddedTokens(tokens);
  }

  /// Returns the id of the token with text `content`. A token outside the vocabulary gets the next
  /// free id.
  std::int64_t id_of(const std::string& content) const {
    if (const auto known = ids_.find(content); known != ids_.end()) {
      return known->second;
    }
    const int id = model_->id(content);
    return model_->piece(id) == content ? id : vocabulary();
  }

  /// Returns the token that begins or ends texts; an empty list if the tokenizer has no such token.
  /// `of_model`: the token's id in the model, or -1.
  std::vector<std::int64_t> tokens_of(const TextEnd& end, int of_model) const {
    if (end.text) {
      return {id_of(*end.text)};
    }
    return of_model < 0 ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{of_model};
  }

  static std::vector<int> pieces_of(const PieceModel& model, std::string_view text) {
    std::vector<int> ids;
    const std::string fault = model.encode(text, ids);
    TESSERA_CHECK(fault.empty(), "SentencePiece cannot encode the text: ", printable(fault));
    return ids;
  }

  /// Encodes a text after a special token. SentencePiece would drop a leading space. So, as in
  /// `transformers`, the unknown token's text is prepended, and its pieces are removed from the
  /// result.
  std::vector<int> pieces_within(std::string_view part) const {
    if (!part.starts_with(' ') && !part.starts_with(kSpaceMark)) {
      return pieces_of(*within_, part);
    }
    const std::string unknown = model_->piece(model_->id_of_unknown());
    const auto length = pieces_of(*within_, unknown).size();
    std::vector<int> ids = pieces_of(*within_, unknown + std::string(part));
    ids.erase(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(std::min(length, ids.size())));
    return ids;
  }

  void decode_pieces(const std::vector<int>& pieces, std::string& text) const {
    std::string some;
    const PieceModel& model = text.empty() || legacy_ ? *model_ : *within_;
    const std::string fault = model.decode(pieces, some);
    TESSERA_CHECK(fault.empty(), "SentencePiece cannot decode the tokens: ", printable(fault));
    text += some;
  }

  std::unique_ptr<PieceModel> model_;
  std::unique_ptr<PieceModel> within_;  ///< a copy of the model that adds no space before a text
  bool legacy_ = true;  ///< whether each text between special tokens gets a leading space
  AddedTokens added_;
  std::set<std::int64_t> special_;  ///< tokens that decode to an empty text
  std::map<std::string, std::int64_t> ids_;
  std::vector<std::string> behind_;  ///< texts of the tokens outside the model's vocabulary, by id
  std::vector<std::int64_t> begin_, end_;
  std::optional<bool> begins_texts_;
};

}  // namespace

TokenizerPtr sentencepiece_tokenizer(const std::string& path) {
  return sentencepiece_tokenizer(path, {});
}

TokenizerPtr sentencepiece_tokenizer(const std::string& path, const TokenizerSettings& settings) {
  return std::make_shared<SentencePieceTokenizer>(path, settings);
}

}  // namespace tessera::data
