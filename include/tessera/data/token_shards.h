#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::files {
class AtomicFile;
}

namespace tessera::data {

/// A sequence of token ids. Immutable: several threads may read one sequence.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::int64_t size() const = 0;
  /// Writes tokens [begin, begin + out.size()) to `out`. Throws Error for a range beyond size().
  virtual void read(std::int64_t begin, std::span<std::int64_t> out) const = 0;
};
/// A shared pointer to a sequence of token ids.
using TokenSourcePtr = std::shared_ptr<const TokenSource>;

/// Returns a copy of `tokens` in memory, with 1, 2, 4 or 8 bytes for each token.
TokenSourcePtr make_token_source(const std::vector<std::int64_t>& tokens);

/// Opens the llm.c shards `files`, in the given order, as one sequence of tokens. A shard is a
/// header of 256 int32 (magic, version, token count) followed by the tokens, little endian: magic
/// 20240520 with uint16 tokens, or 20240801 with uint32 tokens. Throws Error, with the file's name,
/// for a bad magic or version, for a file length that contradicts the token count, and for anything
/// but a regular file.
TokenSourcePtr open_token_shards(const std::vector<std::string>& files);

/// Writes one llm.c shard with several calls of append(). The file appears when finish() is called.
/// Not thread safe. All calls throw Error if the file cannot be written.
class TokenShardWriter {
 public:
  /// Writes tokens of 16 bits if `vocabulary` is at most 65,536, and of 32 bits otherwise.
  TokenShardWriter(const std::filesystem::path& path, std::int64_t vocabulary);
  ~TokenShardWriter();
  /// Appends tokens to the shard. Throws Error for a token that needs more bits than a token of the
  /// shard, and for more than 2^31 - 1 tokens in total.
  void append(std::span<const std::int64_t> tokens);
  /// Returns the number of tokens written so far.
  std::int64_t size() const { return size_; }
  /// Syncs the temporary file, and renames the file to the path of the shard. No function of the
  /// writer may be called after finish().
  void finish();

 private:
  std::unique_ptr<tessera::files::AtomicFile> file_;
  bool wide_;
  std::int64_t size_ = 0;
};

}  // namespace tessera::data
TESSERA_API_END
