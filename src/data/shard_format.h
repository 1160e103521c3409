#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "tessera/data/token_shards.h"

namespace tessera::data {

/// The header of an llm.c token shard: 256 int32, the first three of which are used.
using ShardHeader = std::array<std::int32_t, 256>;
inline constexpr std::size_t kShardHeaderBytes = sizeof(ShardHeader);

/// One of the two kinds of shard.
struct ShardKind {
  std::int32_t magic;
  std::int32_t version;  ///< that llm.c writes
  std::size_t token_bytes;
};
inline constexpr ShardKind kUint16Shard{20240520, 1, sizeof(std::uint16_t)};
inline constexpr ShardKind kUint32Shard{20240801, 7, sizeof(std::uint32_t)};

static_assert(std::endian::native == std::endian::little, "token shards are little endian");

}  // namespace tessera::data
