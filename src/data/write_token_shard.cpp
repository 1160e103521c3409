#include <filesystem>
#include <limits>
#include <span>
#include <vector>

#include "shard_format.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"
#include "tessera/data/token_shards.h"

namespace tessera::data {
namespace {

template <class Token>
std::vector<Token> narrow(std::span<const std::int64_t> tokens) {
  std::vector<Token> result;
  result.reserve(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    TESSERA_CHECK(tokens[i] >= 0 && tokens[i] <= std::numeric_limits<Token>::max(), "token ",
                  tokens[i], " at position ", i, " does not fit into ", 8 * sizeof(Token),
                  " bits: write a wider shard");
    result.push_back(static_cast<Token>(tokens[i]));
  }
  return result;
}

/// Header and tokens, complete or not at all.
template <class Token>
void write_shard(const std::filesystem::path& path, const ShardKind& kind,
                 const std::vector<Token>& tokens) {
  ShardHeader header{};
  header[0] = kind.magic;
  header[1] = kind.version;
  header[2] = static_cast<std::int32_t>(tokens.size());
  AtomicFile file(path);
  file.write_at(0, std::as_bytes(std::span(header)));
  file.write_at(sizeof(header), std::as_bytes(std::span(tokens)));
  file.sync();
  file.publish();
}

}  // namespace

void write_token_shard(const std::filesystem::path& path, std::span<const std::int64_t> tokens,
                       TokenWidth width) {
  TESSERA_CHECK(tokens.size() <= std::numeric_limits<std::int32_t>::max(), tokens.size(),
                " tokens are too many for one shard: write several of at most ",
                std::numeric_limits<std::int32_t>::max());
  if (width == TokenWidth::kUint16) {
    write_shard(path, kUint16Shard, narrow<std::uint16_t>(tokens));
  } else {
    write_shard(path, kUint32Shard, narrow<std::uint32_t>(tokens));
  }
}

}  // namespace tessera::data
