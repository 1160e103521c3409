#include "safetensors/format.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using c10::ScalarType;

/// The order of the reference implementation's enum, on which the order of tensors in a file
/// depends.
constexpr SafetensorsDtype kDtypes[] = {
    {"BOOL", 8, ScalarType::Bool, 0},
    {"F4", 4, ScalarType::Undefined, 1},
    {"F6_E2M3", 6, ScalarType::Undefined, 2},
    {"F6_E3M2", 6, ScalarType::Undefined, 3},
    {"U8", 8, ScalarType::Byte, 4},
    {"I8", 8, ScalarType::Char, 5},
    {"F8_E5M2", 8, ScalarType::Float8_e5m2, 6},
    {"F8_E4M3", 8, ScalarType::Float8_e4m3fn, 7},
    {"F8_E8M0", 8, ScalarType::Float8_e8m0fnu, 8},
    {"F8_E4M3FNUZ", 8, ScalarType::Float8_e4m3fnuz, 9},
    {"F8_E5M2FNUZ", 8, ScalarType::Float8_e5m2fnuz, 10},
    {"I16", 16, ScalarType::Short, 11},
    {"U16", 16, ScalarType::UInt16, 12},
    {"F16", 16, ScalarType::Half, 13},
    {"BF16", 16, ScalarType::BFloat16, 14},
    {"I32", 32, ScalarType::Int, 15},
    {"U32", 32, ScalarType::UInt32, 16},
    {"F32", 32, ScalarType::Float, 17},
    {"C64", 64, ScalarType::ComplexFloat, 18},
    {"F64", 64, ScalarType::Double, 19},
    {"I64", 64, ScalarType::Long, 20},
    {"U64", 64, ScalarType::UInt64, 21},
};

template <class Predicate>
const SafetensorsDtype* find_where(Predicate predicate) {
  const auto* found = std::find_if(std::begin(kDtypes), std::end(kDtypes), predicate);
  return found == std::end(kDtypes) ? nullptr : found;
}

/// Whether UTF-8 begins with a control character (U+0000 to U+001F, U+007F to U+009F), or one that
/// turns the direction of the text behind it (U+202A to U+202E, U+2066 to U+2069), which can make a
/// terminal show another name.
bool begins_with_control(std::string_view text) {
  const auto within = [text](std::size_t i, unsigned char first, unsigned char last) {
    const auto byte = static_cast<unsigned char>(text[i]);
    return first <= byte && byte <= last;
  };
  if (text.starts_with('\xc2') && text.size() > 1) {
    return within(1, 0x80, 0x9f);
  }
  if (text.starts_with("\xe2\x80") && text.size() > 2) {
    return within(2, 0xaa, 0xae);
  }
  if (text.starts_with("\xe2\x81") && text.size() > 2) {
    return within(2, 0xa6, 0xa9);
  }
  return within(0, 0, 0x1f) || within(0, 0x7f, 0x7f);
}

}  // namespace

const SafetensorsDtype* find_dtype(std::string_view name) {
  return find_where([&](const SafetensorsDtype& dtype) { return dtype.name == name; });
}

const SafetensorsDtype* find_dtype(c10::ScalarType type) {
  // Several rows have it: it stands for "libtorch has none".
  if (type == ScalarType::Undefined) {
    return nullptr;
  }
  return find_where([&](const SafetensorsDtype& dtype) { return dtype.scalar_type == type; });
}

std::uint64_t tensor_bytes(std::span<const std::int64_t> sizes, const SafetensorsDtype& dtype) {
  // Zeros don't shorten the check: a product that wraps to 0 must not pass as an empty tensor.
  std::int64_t positions = 1;
  for (const auto size : sizes) {
    TESSERA_CHECK(!__builtin_mul_overflow(positions, std::max<std::int64_t>(size, 1), &positions),
                  "the number of its elements overflows");
  }
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  std::uint64_t bits = 0;
  TESSERA_CHECK(!__builtin_mul_overflow(empty ? 0 : positions, dtype.bits, &bits),
                "the number of its bytes overflows");
  // Types of 4 and 6 bits can end within a byte, which the format forbids.
  TESSERA_CHECK(bits % 8 == 0, "its ", bits, " bits are not a whole number of bytes");
  return bits / 8;
}

bool has_control_character(std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (begins_with_control(text.substr(i))) {
      return true;
    }
  }
  return false;
}

/// The format allows any string. Programs make file names of them, and print them to terminals.
void check_tensor_name(std::string_view name) {
  constexpr std::size_t kMaxNameBytes = 4096;
  TESSERA_CHECK(!name.empty(), "a tensor's name is empty");
  TESSERA_CHECK(name.size() <= kMaxNameBytes, "a tensor's name has ", name.size(),
                " bytes, more than ", kMaxNameBytes);
  TESSERA_CHECK(!has_control_character(name), "a tensor's name has a control character");
  TESSERA_CHECK(name != "__metadata__",
                "the tensor name '__metadata__' is that of a file's own entry: rename the tensor");
  TESSERA_CHECK(
      name.find_first_of("/\\") == std::string::npos && name.find("..") == std::string::npos,
      "the tensor name '", name, "' looks like a path");
}

}  // namespace tessera::checkpoint
