#include "examples/llama/tokenize/piece_encoder.h"

#include <filesystem>
#include <string_view>
#include <utility>

#include "examples/llama/fingerprints.h"
#include "examples/llama/models.h"
#include "tessera/core/error.h"
#include "tessera/data/text.h"

namespace llama {
namespace {

/// A number is an id, anything else the text of one token.
std::int64_t token_of(const std::string& text, const tessera::data::Tokenizer& tokenizer) {
  const bool is_id = text.find_first_not_of("0123456789") == std::string::npos && text.size() < 10;
  const std::vector<std::int64_t> ids =
      is_id ? std::vector<std::int64_t>{std::stoll(text)} : tokenizer.encode(text);
  TESSERA_CHECK(ids.size() == 1, "--eos-token \"", text, "\" is ", ids.size(),
                " tokens of the tokenizer; name one, by its id or its text");
  TESSERA_CHECK(ids[0] < tokenizer.vocabulary(), "--eos-token ", ids[0],
                " is outside the tokenizer's vocabulary of ", tokenizer.vocabulary());
  return ids[0];
}

/// Cut as a text file is, so that no more memory is needed for it.
void encode_long(const tessera::data::Tokenizer& tokenizer, std::string_view text,
                 std::vector<std::int64_t>& tokens) {
  while (!text.empty()) {
    const std::size_t bytes =
        text.size() > kPieceBytes ? cut_of(text.substr(0, kPieceBytes + 1)) : text.size();
    const std::vector<std::int64_t> some = tokenizer.encode(text.substr(0, bytes));
    // As many of each piece: a vector that doubles would take three times as much.
    tokens.reserve(tokens.size() + some.size() * ((text.size() + bytes - 1) / bytes));
    tokens.insert(tokens.end(), some.begin(), some.end());
    text.remove_prefix(bytes);
  }
}

}  // namespace

PieceEncoder make_encoder(const TokenizeOptions& o, std::vector<std::string> files) {
  PieceEncoder encoder{.tokenizer = tessera::data::open_tokenizer(o.tokenizer),
                       .begin = {},
                       .end = {},
                       .files = std::move(files),
                       .field = o.field};
  const tessera::data::Tokenizer& tokenizer = *encoder.tokenizer;
  const bool is_folder = std::filesystem::is_directory(o.tokenizer);
  const SpecialTokens special = special_tokens_of(is_folder ? o.tokenizer : "");
  if (o.bos) {
    encoder.begin = tokenizer.begin_tokens();
    if (encoder.begin.empty()) {
      encoder.begin = special.begin;
    }
    TESSERA_CHECK(!encoder.begin.empty(), "--bos: '", o.tokenizer,
                  "' names no token that begins a text; leave --bos out");
  }
  if (o.eos) {
    encoder.end = o.eos_token.empty() ? document_end(&tokenizer, special)
                                      : std::vector{token_of(o.eos_token, tokenizer)};
    TESSERA_CHECK(!encoder.end.empty(), "'", o.tokenizer,
                  "' names no token that ends a document; pass --eos-token, --no-eos, or as "
                  "--tokenizer the folder of the model");
  }
  for (const auto* tokens : {&encoder.begin, &encoder.end}) {
    for (const std::int64_t token : *tokens) {
      TESSERA_CHECK(token < tokenizer.vocabulary(), "the model's token ", token,
                    " is outside the tokenizer's vocabulary of ", tokenizer.vocabulary(),
                    "; pass the tokenizer of this model");
    }
  }
  return encoder;
}

nlohmann::json describe(const TokenizeOptions& o, const PieceEncoder& encoder) {
  // One by itself and none as null, as before there could be several.
  const auto all = [](const std::vector<std::int64_t>& ids) {
    if (ids.size() > 1) {
      return nlohmann::json(ids);
    }
    return ids.empty() ? nlohmann::json() : nlohmann::json(ids.front());
  };
  return {{"files", to_json(tessera::data::fingerprints(encoder.files))},
          {"tokenizer", tokenizer_fingerprint(o.tokenizer)},
          {"begin_token", all(encoder.begin)},
          {"end_token", all(encoder.end)},
          {"all_jsonl", o.jsonl},
          {"field", o.field},
          {"tokens_a_shard", o.shard_tokens}};
}

/// The piece is freed when its text is known.
std::string PieceEncoder::text_of(Piece piece) const {
  if (!piece.is_json) {
    return std::move(piece.text);
  }
  const std::string origin = files[piece.place.file] + ":" + std::to_string(piece.place.line);
  return std::move(tessera::data::json_texts(piece.text, {field}, origin).front());
}

std::vector<std::int64_t> PieceEncoder::operator()(Piece piece) const {
  const bool begins = piece.begins;
  const bool ends = piece.ends;
  const std::string text = text_of(std::move(piece));
  std::vector<std::int64_t> tokens;
  if (text.empty()) {
    return tokens;
  }
  if (begins) {
    tokens = begin;
  }
  encode_long(*tokenizer, text, tokens);
  if (ends) {
    tokens.insert(tokens.end(), end.begin(), end.end());
  }
  return tokens;
}

}  // namespace llama
