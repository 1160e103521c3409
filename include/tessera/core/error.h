#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The type of all exceptions that this library itself throws. The message is one line: what was
/// requested, what was found, and how to correct the input.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

/// Writes the arguments one after another to a stream, and returns the text.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace detail

/// Throws an Error whose message is the concatenation of `parts`.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(detail::concat(parts...));
}

/// Returns the candidate with the smallest Levenshtein distance from `word`, for a message about an
/// unknown name; "" without candidates.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace tessera
TESSERA_API_END

/// Throws tessera::Error unless `condition`. The arguments after `condition` form the message.
#define TESSERA_CHECK(condition, ...) \
  do {                                \
    if (!(condition)) [[unlikely]] {  \
      ::tessera::fail(__VA_ARGS__);   \
    }                                 \
  } while (false)
