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

/// Opens llm.c shards as one sequence of tokens, in the order of `files`. A shard is 256 int32
/// (magic, version, token count), then the tokens, little endian. Magic 20240520: uint16 tokens;
/// 20240801: uint32 tokens. Throws Error for a wrong header, a wrong file length, or a file that is
/// not regular.
TokenSourcePtr open_token_shards(const std::vector<std::string>& files);

/// Writes one llm.c shard with several calls of append(). The file appears when finish() is called.
/// Not thread safe. All calls throw Error if the file cannot be written.
class TokenShardWriter {
 public:
  /// Writes tokens of 16 bits if `vocabulary` is at most 65,536, and of 32 bits otherwise.
  TokenShardWriter(const std::filesystem::path& path, std::int64_t vocabulary);
  ~TokenShardWriter();
  /// Appends tokens to the shard. Throws Error for a token that does not fit the shard's integer
  /// type, and above 2^31 - 1 tokens.
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
