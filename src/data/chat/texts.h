#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "chat/value.h"

namespace tessera::data::chat {

// Shared by filters and methods, with the behaviour of Python's functions of these names.

/// White space of str.isspace(): Unicode's, and four control characters.
bool is_space(char32_t code);
/// Without white space, or without `characters`, at its ends.
std::string stripped(std::string_view text, const Value& characters, bool left, bool right);
/// `most`: how many are replaced; all if it is undefined or negative.
std::string replaced(std::string_view text, std::string_view from, std::string_view to,
                     const Value& most);
Json split(std::string_view text, const Value& separator, const Value& most);
/// Whether a text begins, or ends, with one of some.
bool has_affix(const std::string& text, const Value& affix, bool begin);
std::string joined(const Value& list, const std::string& between);
/// The keys of a mapping with their values.
Json items_of(const Value& map);
std::int64_t length_of(const Value& value);
std::string indented(const std::string& text, const Arguments& arguments);

}  // namespace tessera::data::chat
