// What the safetensors format allows: types of elements, sizes and names. Shared by the parser of
// headers and the writer, so that we write nothing that we would refuse to read.

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace tessera::checkpoint {

/// One of the types of the safetensors format.
struct SafetensorsDtype {
  std::string_view name;
  int bits;
  c10::ScalarType scalar_type;  ///< Undefined where libtorch has no such type
  int order;                    ///< the reference writes tensors by falling order, then by name
};

/// nullptr for a name that the format lacks.
const SafetensorsDtype* find_dtype(std::string_view name);
/// nullptr for a type that the format lacks.
const SafetensorsDtype* find_dtype(c10::ScalarType type);

/// Bytes of a tensor of these sizes. Throws Error if their product, zeros counted as ones, or the
/// number of bits does not fit into 64 bits, or if it is not a whole number of bytes.
std::uint64_t tensor_bytes(std::span<const std::int64_t> sizes, const SafetensorsDtype& dtype);

/// Whether UTF-8 has a control character, or one that turns the direction of text: in a message it
/// could break the line, or show another name.
bool has_control_character(std::string_view text);

/// Throws Error for a tensor name that no program should trust: empty, longer than 4 KiB, with a
/// control character, one that turns the direction of text, a path separator or "..", or that of a
/// header's own entry.
void check_tensor_name(std::string_view name);

}  // namespace tessera::checkpoint
