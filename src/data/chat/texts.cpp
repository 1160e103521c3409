#include "chat/texts.h"

#include <algorithm>
#include <cctype>

#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {

std::string stripped(std::string_view text, const Value& characters, bool left, bool right) {
  const std::string_view all = characters.is_text() ? std::string_view(characters.text()) : kSpaces;
  if (left) {
    text.remove_prefix(std::min(text.find_first_not_of(all), text.size()));
  }
  if (right) {
    text = text.substr(0, text.find_last_not_of(all) + 1);
  }
  return std::string(text);
}

std::string cased(std::string text, bool upper) {
  for (char& c : text) {
    const bool changes = upper ? c >= 'a' && c <= 'z' : c >= 'A' && c <= 'Z';
    c = changes ? static_cast<char>(c ^ 0x20) : c;
  }
  return text;
}

std::string capitalized(const std::string& text, bool every) {
  std::string out = cased(text, /*upper=*/false);
  bool begins = true;
  for (char& c : out) {
    const bool letter = std::isalpha(static_cast<unsigned char>(c)) != 0;
    c = begins && letter ? static_cast<char>(std::toupper(c)) : c;
    begins = every && !letter;
  }
  return out;
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  TESSERA_CHECK(!from.empty(), "replace() of an empty text is not implemented");
  std::string out;
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from)) {
    out += text.substr(0, at);
    out += to;
    text.remove_prefix(at + from.size());
  }
  return out += text;
}

Json split(std::string_view text, const Value& separator, const Value& most) {
  Json parts = Json::array();
  std::int64_t left = most.is_undefined() ? -1 : most.integer();
  if (!separator.is_text()) {
    while (text.find_first_not_of(kSpaces) != std::string::npos) {
      text.remove_prefix(text.find_first_not_of(kSpaces));
      const std::size_t end =
          left-- == 0 ? text.size() : std::min(text.find_first_of(kSpaces), text.size());
      parts.push_back(std::string(text.substr(0, end)));
      text.remove_prefix(end);
    }
    return parts;
  }
  const std::string& between = separator.text();
  TESSERA_CHECK(!between.empty(), "split() at an empty text");
  for (std::size_t at = text.find(between); at != std::string::npos && left-- != 0;
       at = text.find(between)) {
    parts.push_back(std::string(text.substr(0, at)));
    text.remove_prefix(at + between.size());
  }
  parts.push_back(std::string(text));
  return parts;
}

bool has_affix(const std::string& text, const Value& affix, bool begin) {
  const auto has = [&](const Value& one) {
    return begin ? text.starts_with(one.text()) : text.ends_with(one.text());
  };
  if (affix.is_list()) {
    return std::ranges::any_of(affix.elements(), has);
  }
  return has(affix);
}

std::string joined(const Value& list, const std::string& between) {
  std::string out;
  bool first = true;
  for (const Value& value : list.elements()) {
    out += (first ? "" : between) + value.shown();
    first = false;
  }
  return out;
}

Json items_of(const Value& map) {
  Json items = Json::array();
  TESSERA_CHECK(map.is_map(), "items of a mapping are needed, but it is ", map.kind());
  for (const auto& [key, value] : map.json().items()) {
    items.push_back(Json::array({key, value}));
  }
  return items;
}

std::int64_t length_of(const Value& value) {
  return value.is_text() || !value.is_json() ? static_cast<std::int64_t>(value.elements().size())
                                             : static_cast<std::int64_t>(value.json().size());
}

std::string indented(const std::string& text, const Arguments& arguments) {
  const Value width = arguments.at(0, "width");
  const std::string spaces(static_cast<std::size_t>(width.is_undefined() ? 4 : width.integer()),
                           ' ');
  std::string out = arguments.at(1, "first") ? spaces : "";
  for (std::size_t i = 0; i < text.size(); ++i) {
    out += text[i];
    out += text[i] == '\n' && i + 1 < text.size() && text[i + 1] != '\n' ? spaces : "";
  }
  return out;
}

}  // namespace tessera::data::chat
