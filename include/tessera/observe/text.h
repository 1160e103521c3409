// Text for people: numbers in short, and anything as HTML. For the report, the progress line and
// the log.
#pragma once

#include <string>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// Text as the content of an element or of a quoted attribute. Bytes that are not valid UTF-8, and
/// control characters other than tab and line feed, become U+FFFD.
std::string escape_html(std::string_view text);

/// "1,234,567.89": thousands are separated, whatever the locale.
std::string grouped(double value, int decimals = 0);
/// "3.4 GiB", "512 B".
std::string bytes_text(double bytes);
/// At most four significant digits, with k, M or G: "12.3k", "0.0123".
std::string compact(double value);
/// "42s", "3m20s", "2h05m", "1d04h".
std::string duration_text(double seconds);

}  // namespace tessera::observe
TESSERA_API_END
