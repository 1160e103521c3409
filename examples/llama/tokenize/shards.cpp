// The output of llama_tokenize.

#include "examples/llama/tokenize/shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "examples/llama/start.h"
#include "tessera/core/error.h"
#include "tessera/data/text.h"

namespace llama {
namespace {

/// The token that a text names: a number is a token id, any other text must be one token.
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

/// Encodes a long text in pieces, which limits memory. The text is cut like a text file.
void encode_long(const tessera::data::Tokenizer& tokenizer, std::string_view text,
                 std::vector<std::int64_t>& tokens) {
  while (!text.empty()) {
    const std::size_t bytes =
        text.size() > kPieceBytes ? cut_of(text.substr(0, kPieceBytes + 1)) : text.size();
    const std::vector<std::int64_t> some = tokenizer.encode(text.substr(0, bytes));
    // Memory for the tokens is reserved as if every piece of text had as many tokens as this piece,
    // because a vector that doubles its capacity would take three times the memory.
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

std::string PieceEncoder::text_of(Piece piece) const {
  if (!piece.is_json) {
    return std::move(piece.text);
  }
  const std::string origin = files[piece.place.file] + ":" + std::to_string(piece.place.line);
  tessera::data::JsonTexts value =
      std::move(tessera::data::json_text_lists(piece.text, {field}, origin).front());
  TESSERA_CHECK(
      !value.is_list, origin, ": the field \"", field,
      "\" must be a text, but it is of the kind array; correct it, or name another field");
  return std::move(value.texts.front());
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

using namespace tessera;
namespace {

/// Whether a name has the form PREFIX_000012.bin. `base`: PREFIX without its folder.
bool is_shard(std::string_view name, const std::string& base) {
  if (!name.starts_with(base + "_") || !name.ends_with(".bin")) {
    return false;
  }
  name.remove_prefix(base.size() + 1);
  name.remove_suffix(4);
  return name.size() == 6 &&
         std::ranges::all_of(name, [](unsigned char c) { return std::isdigit(c) != 0; });
}

}  // namespace

ShardSet::ShardSet(std::string prefix, data::TokenWidth width, std::int64_t shard_tokens)
    : prefix_(std::move(prefix)), width_(width), shard_tokens_(shard_tokens) {
  const std::filesystem::path path(prefix_);
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    TESSERA_CHECK(!is_shard(entry.path().filename().string(), path.filename().string()), "--out: '",
                  entry.path().string(),
                  "' exists; remove the shards of an earlier run, or give another --out");
  }
  TESSERA_CHECK(!error, "the folder of --out '", prefix_, "' can't be read: ", error.message(),
                "; make it first");
}

void ShardSet::append(std::span<const std::int64_t> tokens) {
  while (!tokens.empty()) {
    if (!writer_) {
      writer_ = std::make_unique<data::TokenShardWriter>(
          fmt::format("{}_{:06}.bin", prefix_, shards_), width_);
    }
    const auto room = static_cast<std::size_t>(shard_tokens_ - writer_->size());
    const std::size_t count = std::min(room, tokens.size());
    writer_->append(tokens.first(count));
    tokens = tokens.subspan(count);
    tokens_ += static_cast<std::int64_t>(count);
    if (writer_->size() == shard_tokens_) {
      end_shard();
    }
  }
}

void ShardSet::end_shard() {
  writer_->finish();
  writer_.reset();
  ++shards_;
}

void ShardSet::finish() {
  TESSERA_CHECK(tokens_ > 0, "the files hold no token; give files with text");
  if (writer_) {
    end_shard();
  }
}

}  // namespace llama
