#include "tensor_bytes.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::checkpoint {

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
  TESSERA_CHECK(bits % 8 == 0, "its ", bits, " bits are not a whole number of bytes");
  return bits / 8;
}

void check_tensor_name(std::string_view name) {
  constexpr std::size_t kMaxNameBytes = 4096;
  TESSERA_CHECK(!name.empty(), "a tensor's name is empty");
  TESSERA_CHECK(name.size() <= kMaxNameBytes, "a tensor's name has ", name.size(),
                " bytes, more than ", kMaxNameBytes);
  const bool control =
      std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  TESSERA_CHECK(!control, "a tensor's name has a control character");
  TESSERA_CHECK(name.find_first_of("/\\") == name.npos && name.find("..") == name.npos,
                "the tensor name '", name, "' looks like a path");
}

}  // namespace tessera::checkpoint
