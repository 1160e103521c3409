#pragma once

#include <string>
#include <string_view>

namespace tessera::data {

/// An expression of Oniguruma in PCRE2's syntax. Throws Error, with the construct, for what the two
/// read differently.
std::string translate_pattern(std::string_view expression);

/// An expression that matches `text` itself.
std::string quote_pattern(std::string_view text);

}  // namespace tessera::data
