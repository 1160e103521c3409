#include "safetensors/natural_numbers.h"

#include <cstddef>

#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

/// As many as libtorch's operators take (at::dim_bitset_size).
constexpr std::size_t kMaxDims = 64;

}  // namespace

/// The parser gives "unsigned" for natural numbers of 64 bits alone.
std::int64_t natural_number(const nlohmann::json& value, const char* what) {
  TESSERA_CHECK(value.is_number_unsigned(), what, " holds ",
                value.is_number() ? value.dump() : value.type_name(),
                ", which is not a natural number");
  const auto number = value.get<std::uint64_t>();
  TESSERA_CHECK(std::in_range<std::int64_t>(number), what, " holds ", number,
                ", which is too large");
  return static_cast<std::int64_t>(number);
}

std::vector<std::int64_t> natural_numbers(const nlohmann::json& value, const char* what) {
  TESSERA_CHECK(value.is_array(), what, " is not a list");
  TESSERA_CHECK(value.size() <= kMaxDims, what, " has ", value.size(), " dimensions");
  std::vector<std::int64_t> numbers;
  for (const auto& element : value) {
    numbers.push_back(natural_number(element, what));
  }
  return numbers;
}

}  // namespace tessera::checkpoint
