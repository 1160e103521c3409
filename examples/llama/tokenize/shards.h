// The output of llama_tokenize: encoded pieces of text, in shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "examples/llama/texts/texts.h"
#include "examples/llama/tokenize/tokenize_options.h"
#include "tessera/data/token_shards.h"
#include "tessera/data/tokenizer.h"

namespace llama {

/// Converts pieces of text to tokens. Immutable: several threads may use one encoder.
struct PieceEncoder {
  tessera::data::TokenizerPtr tokenizer;
  std::vector<std::int64_t> begin, end;  ///< tokens before and after each document
  std::vector<std::string> files;        ///< file names for messages
  std::string field;                     ///< the field with the text in JSONL objects

  /// Returns the tokens of a piece of text; no tokens for a document without text. Throws Error,
  /// with file and line, for a JSONL line that is not an object with this field as text.
  std::vector<std::int64_t> operator()(Piece piece) const;

 private:
  std::string text_of(Piece piece) const;
};

/// Throws tessera::Error if the tokenizer lacks a token that --bos, --eos or --eos-token requires.
PieceEncoder make_encoder(const TokenizeOptions& options, std::vector<std::string> files);

/// Writes PREFIX_000000.bin, PREFIX_000001.bin and so on, all with the same number of tokens except
/// the last. A shard appears when it is complete. Not thread safe.
class ShardSet {
 public:
  /// Throws Error if a shard of this prefix already exists, because PREFIX_*.bin would also match
  /// the existing shard.
  ShardSet(std::string prefix, tessera::data::TokenWidth width, std::int64_t shard_tokens);

  void append(std::span<const std::int64_t> tokens);
  /// Completes the last shard. Throws Error if there were no tokens.
  void finish();

  std::size_t shards() const { return shards_; }
  /// The number of tokens in all shards.
  std::int64_t tokens() const { return tokens_; }

 private:
  void end_shard();

  std::string prefix_;
  tessera::data::TokenWidth width_;
  std::int64_t shard_tokens_;
  std::size_t shards_ = 0;
  std::int64_t tokens_ = 0;
  std::unique_ptr<tessera::data::TokenShardWriter> writer_;
};

}  // namespace llama
