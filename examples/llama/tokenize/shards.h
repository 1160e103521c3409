// The output of llama_tokenize: encoded pieces of texts, in shards.
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

/// From pieces to tokens. Immutable: threads share it.
struct PieceEncoder {
  tessera::data::TokenizerPtr tokenizer;
  std::vector<std::int64_t> begin, end;  ///< tokens around each document
  std::vector<std::string> files;        ///< for messages
  std::string field;                     ///< the one with the text, in JSONL objects

  /// None for a document without text. Throws Error, with file and line, for a line that is not an
  /// object with such a text.
  std::vector<std::int64_t> operator()(Piece piece) const;

 private:
  std::string text_of(Piece piece) const;
};

/// Throws tessera::Error where the tokenizer does not have what --bos, --eos and --eos-token ask
/// for.
PieceEncoder make_encoder(const TokenizeOptions& options, std::vector<std::string> files);

/// Writes PREFIX_000000.bin, PREFIX_000001.bin and so on, with equally many tokens except the last.
/// A shard appears when it is complete. Not thread safe.
class ShardSet {
 public:
  /// Throws Error if a shard of this prefix exists, since PREFIX_*.bin would match it as well.
  ShardSet(std::string prefix, tessera::data::TokenWidth width, std::int64_t shard_tokens);

  void append(std::span<const std::int64_t> tokens);
  /// Ends the last shard. Throws Error if there was no token.
  void finish();

  std::size_t shards() const { return shards_; }
  /// The tokens of all shards.
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
