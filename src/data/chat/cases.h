#pragma once

#include <string>

namespace tessera::data::chat {

// As Python's methods of str and Jinja2's filters. Each throws Error for a text whose other case is
// not known here; `what` is what was asked of it, for the message.

std::string lowered(const std::string& text);
std::string uppered(const std::string& text, const std::string& what);
/// str.capitalize().
std::string capitalized(const std::string& text, const std::string& what);
/// str.title(): a word is what has a case.
std::string titled(const std::string& text, const std::string& what);
/// The filter `title`: a word is what stands between white space, "-" and opening brackets.
std::string titled_words(const std::string& text, const std::string& what);

}  // namespace tessera::data::chat
