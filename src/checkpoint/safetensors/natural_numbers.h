// Numbers of JSON that a stranger may have written. They may be negative, fractions or beyond 64
// bits; the library would convert all of these without a word.

#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

namespace tessera::checkpoint {

/// Throws Error, naming `what` ("its shape"), for all but a natural number of at most 2^63 - 1.
std::int64_t natural_number(const nlohmann::json& value, const char* what);

/// A list of such, one for each dimension of a tensor. Throws Error also for more of them than
/// libtorch's operators take.
std::vector<std::int64_t> natural_numbers(const nlohmann::json& value, const char* what);

}  // namespace tessera::checkpoint
