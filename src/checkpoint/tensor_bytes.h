#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "safetensors_dtype.h"

namespace tessera::checkpoint {

/// Bytes of a tensor of these sizes. Throws Error if their product, zeros counted as ones, or the
/// number of bits does not fit into 64 bits, or if it is not a whole number of bytes.
std::uint64_t tensor_bytes(std::span<const std::int64_t> sizes, const SafetensorsDtype& dtype);

/// Throws Error for a tensor name that no program should trust: empty, longer than 4 KiB, with a
/// control character, a path separator or "..".
void check_tensor_name(std::string_view name);

}  // namespace tessera::checkpoint
