// Valid inputs, from which the fuzzer starts.

#pragma once

#include <filesystem>
#include <string>

namespace tessera::fuzz_input {

/// Two shards of a Hugging Face model.
void write_shards(const std::filesystem::path& folder);
/// The index of the shards of write_shards().
std::string index_of_shards();

/// A shard as PyTorch writes it, with two tensors and this DCP_SHARDING_INFO.
std::string shard_with(const std::string& sharding_info);
/// The right DCP_SHARDING_INFO for shard_with().
std::string sharding_info();

/// A manifest without its checksum.
std::string manifest();

}  // namespace tessera::fuzz_input
