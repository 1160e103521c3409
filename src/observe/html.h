#pragma once

#include <string>
#include <string_view>

namespace tessera::observe {

/// Text as the content of an element or of a quoted attribute. Bytes that are not valid UTF-8, and
/// control characters other than tab and line feed, become U+FFFD.
std::string escape_html(std::string_view text);

}  // namespace tessera::observe
