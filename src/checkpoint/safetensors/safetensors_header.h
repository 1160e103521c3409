// The JSON at the beginning of a safetensors file, both ways: parse_header.cpp reads it,
// plan_header.cpp makes it.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/safetensors.h"

namespace tessera::checkpoint {

/// The reference implementation's limit.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> tensors;  ///< offsets from the start of the data
  std::map<std::string, std::string> metadata;
};

/// Parses and checks the header of a file whose data are `data_bytes` long. Throws Error, naming
/// the tensor, for whatever the format forbids.
SafetensorsHeader parse_header(std::string_view text, std::uint64_t data_bytes);

/// The header of a file with these tensors, padded with spaces to a multiple of 8, and where each
/// tensor's data go (from the start of the data).
struct HeaderPlan {
  std::string json;
  std::map<std::string, TensorEntry> tensors;
  std::uint64_t data_bytes = 0;
};
HeaderPlan plan_header(std::vector<SafetensorsWriter::Item> items,
                       const std::map<std::string, std::string>& metadata);

}  // namespace tessera::checkpoint
