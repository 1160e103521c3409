// Valid input, from which the fuzzer begins.

#pragma once

#include <filesystem>
#include <string>

namespace tessera::fuzz_input {

/// Two shards of a Hugging Face model.
void write_shards(const std::filesystem::path& folder);
/// The index of these.
std::string index_of_shards();

/// A shard of PyTorch's writer with this DCP_SHARDING_INFO. It holds two tensors.
std::string shard_with(const std::string& sharding_info);
/// What belongs there.
std::string sharding_info();

/// Without the checksum.
std::string manifest();

}  // namespace tessera::fuzz_input
