// The output of llama_tokenize: encoded pieces of texts, in shards, under a lock.
#pragma once

#include <nlohmann/json.hpp>

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

/// All that the shards depend on.
nlohmann::json describe(const TokenizeOptions& options, const PieceEncoder& encoder);

/// PREFIX_000000.bin, PREFIX_000001.bin, ... of as many tokens each, but for the last, and
/// PREFIX.json, which is written behind each. So a run that is started again begins with the shard
/// that the one before had not finished. One thread at a time.
class ShardSet {
 public:
  /// `description`: what the shards are made of, as an object. Throws Error where there are shards
  /// of another description, of another run, or fewer than PREFIX.json says.
  ShardSet(std::string prefix, nlohmann::json description, tessera::data::TokenWidth width,
           std::int64_t shard_tokens);

  /// The piece that append() is to be given first.
  const PiecePlace& start() const { return next_; }
  /// All shards are there.
  bool is_complete() const { return complete_; }
  /// Those of a piece, whole; pieces come in order.
  void append(const PiecePlace& place, std::span<const std::int64_t> tokens);
  /// Ends the last shard. Throws Error if there was no token, or if the shards there are others.
  void finish();

  std::size_t shards() const { return shards_.size(); }
  /// In all of them.
  std::int64_t tokens() const;

 private:
  std::string manifest() const { return prefix_ + ".json"; }
  std::string path(std::size_t shard) const;
  void resume(const std::string& text);
  void check_shards() const;
  void end_shard();
  void write_manifest() const;

  std::string prefix_;
  nlohmann::json description_;
  tessera::data::TokenWidth width_;
  std::int64_t shard_tokens_;
  std::vector<std::int64_t> shards_;                ///< their tokens
  nlohmann::json files_ = nlohmann::json::array();  ///< their names, sizes and checksums of parts
  PiecePlace next_;                                 ///< the piece that the next shard begins in
  std::int64_t taken_ = 0;  ///< tokens of that piece that the shards before have
  std::int64_t skip_ = 0;   ///< the same of the run's first piece, until it has come
  bool complete_ = false;
  std::unique_ptr<tessera::data::TokenShardWriter> writer_;
};

/// One process at a time writes the shards of a PREFIX: it holds a lock on PREFIX.lock, which is
/// removed at the end. A file that a killed process has left locks nobody out, and file systems
/// without locks let everybody in.
class OutputLock {
 public:
  /// Throws Error where another process has the lock, or the file can't be made.
  explicit OutputLock(const std::string& prefix);
  ~OutputLock();
  OutputLock(const OutputLock&) = delete;
  OutputLock& operator=(const OutputLock&) = delete;

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace llama
