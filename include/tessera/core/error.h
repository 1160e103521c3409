#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The only exception type that this library throws itself. The message is one line that says what
/// was requested, what was found, and how to correct the input.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

/// Concatenates the arguments, streamed one after another, into one string.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace detail

/// Throws Error with the parts streamed into one message.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(detail::concat(parts...));
}

/// The first of the candidates with the smallest Levenshtein distance from `word`, for a message
/// about an unknown name. Returns "" if there are no candidates.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace tessera
TESSERA_API_END

/// Throws tessera::Error with the remaining arguments streamed into one message unless `condition`.
#define TESSERA_CHECK(condition, ...) \
  do {                                \
    if (!(condition)) [[unlikely]] {  \
      ::tessera::fail(__VA_ARGS__);   \
    }                                 \
  } while (false)
