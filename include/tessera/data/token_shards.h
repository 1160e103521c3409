#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "tessera/data/token_source.h"

namespace tessera::data {

/// The memory-mapped llm.c shards that match a glob, in byte order of their names, as one sequence.
/// A shard is a header of 256 int32 (magic, version, token count) and the tokens, little endian:
/// magic 20240520 and uint16, or 20240801 and uint32. Throws Error, naming the file, for no match,
/// a bad magic or version, a length other than the count says, or anything but a regular file.
TokenSourcePtr open_token_shards(const std::string& glob);

enum class TokenWidth { kUint16, kUint32 };

/// Writes one such shard; it appears complete or not at all. Throws Error for a token that `width`
/// can't hold, more than 2^31 - 1 tokens, or a failing write.
void write_token_shard(const std::filesystem::path& path, std::span<const std::int64_t> tokens,
                       TokenWidth width = TokenWidth::kUint16);

}  // namespace tessera::data
