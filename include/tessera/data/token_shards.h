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

/// A sequence of token ids. Immutable, so threads may share it.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  /// The number of tokens.
  virtual std::int64_t size() const = 0;
  /// Writes tokens [begin, begin + out.size()) to `out`. Throws Error for a range outside [0,
  /// size()).
  virtual void read(std::int64_t begin, std::span<std::int64_t> out) const = 0;

 protected:
  /// Throws Error unless [begin, begin + count) is inside [0, size()).
  void check_range(std::int64_t begin, std::int64_t count) const;
};
/// Shared by the samples that read the tokens.
using TokenSourcePtr = std::shared_ptr<const TokenSource>;

/// A copy of tokens in memory, in 1, 2, 4 or 8 bytes each, depending on the largest.
TokenSourcePtr make_token_source(const std::vector<std::int64_t>& tokens);

/// The files that match a glob, in byte order on every machine. Throws Error for no match.
std::vector<std::string> token_shard_files(const std::string& pattern);

/// The llm.c shards that match a glob, in that order, as one sequence.
/// A shard is a header of 256 int32 (magic, version, token count) and the tokens, little endian:
/// magic 20240520 and uint16, or 20240801 and uint32. Throws Error, naming the file, for no match,
/// a bad magic or version, a length other than the count says, or anything but a regular file.
TokenSourcePtr open_token_shards(const std::string& glob);
/// Shards in the given order.
TokenSourcePtr open_token_shards(const std::vector<std::string>& files);

/// The type of the tokens in a shard.
enum class TokenWidth { kUint16, kUint32 };

/// Writes one shard in parts. The file appears at finish(). Not thread safe. All calls throw Error
/// if the file cannot be written.
class TokenShardWriter {
 public:
  TokenShardWriter(const std::filesystem::path& path, TokenWidth width);
  ~TokenShardWriter();
  /// Throws Error for a token that does not fit the width, and for more than 2^31 - 1 in all.
  void append(std::span<const std::int64_t> tokens);
  /// The tokens so far.
  std::int64_t size() const { return size_; }
  /// Syncs the file and gives it its name. Call it last.
  void finish();

 private:
  template <class Token>
  void write(std::span<const std::int64_t> tokens);

  std::unique_ptr<tessera::files::AtomicFile> file_;
  TokenWidth width_;
  std::int64_t size_ = 0;
};

/// Writes one shard at once. Throws the writer's errors.
void write_token_shard(const std::filesystem::path& path, std::span<const std::int64_t> tokens,
                       TokenWidth width = TokenWidth::kUint16);

}  // namespace tessera::data
TESSERA_API_END
