#pragma once

#include <cstddef>
#include <string_view>

namespace tessera::data {

/// How many bytes of valid UTF-8 are white space (Unicode's White_Space) at its begin.
std::size_t leading_space(std::string_view text);
/// How many bytes come before that at its end.
std::size_t without_trailing_space(std::string_view text);

}  // namespace tessera::data
