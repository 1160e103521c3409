#include "chat/texts.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {

namespace {

constexpr std::int64_t kMostIndent = 1000;

bool begins_with_space(std::string_view text) {
  const Utf8Step step = first_character(text);
  return step.valid && is_space(code_point(text.substr(0, step.bytes)));
}

/// Cuts off what comes before the next white space, or before what is none.
std::string_view take_until(std::string_view& text, bool space) {
  std::size_t end = 0;
  while (end < text.size() && begins_with_space(text.substr(end)) != space) {
    end += first_character(text.substr(end)).bytes;
  }
  const std::string_view taken = text.substr(0, end);
  text.remove_prefix(end);
  return taken;
}

Json split_at_spaces(std::string_view text, std::int64_t most) {
  Json parts = Json::array();
  for (take_until(text, /*space=*/false); !text.empty(); take_until(text, /*space=*/false)) {
    parts.push_back(std::string(most-- == 0 ? std::exchange(text, {}) : take_until(text, true)));
  }
  return parts;
}

bool is_given(const Value& value) {
  return !value.is_undefined() && !value.is_none();
}

}  // namespace

bool is_space(char32_t code) {
  constexpr std::u32string_view kOthers = U" \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000";
  return (code >= 0x9 && code <= 0xd) || (code >= 0x1c && code <= 0x1f) ||
         (code >= 0x2000 && code <= 0x200a) || kOthers.find(code) != std::string::npos;
}

std::string stripped(std::string_view text, const Value& characters, bool left, bool right) {
  const auto goes = [&](std::string_view character) {
    // A character of UTF-8 is found in no other place than its own.
    return is_given(characters) ? characters.text().find(character) != std::string::npos
                                : begins_with_space(character);
  };
  while (left && !text.empty() && goes(text.substr(0, first_character(text).bytes))) {
    text.remove_prefix(first_character(text).bytes);
  }
  while (right && !text.empty() && goes(last_character(text))) {
    text.remove_suffix(last_character(text).size());
  }
  return std::string(text);
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to,
                     const Value& most) {
  TESSERA_CHECK(!from.empty(), "replace() of an empty text is not implemented");
  std::int64_t left = is_given(most) ? most.integer() : -1;
  std::string out;
  for (std::size_t at = text.find(from); at != std::string::npos && left-- != 0;
       at = text.find(from)) {
    out += text.substr(0, at);
    out += to;
    text.remove_prefix(at + from.size());
  }
  return out += text;
}

Json split(std::string_view text, const Value& separator, const Value& most) {
  std::int64_t left = most.is_undefined() ? -1 : most.integer();
  if (!is_given(separator)) {
    return split_at_spaces(text, left);
  }
  Json parts = Json::array();
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
  const std::int64_t count = width.is_undefined() ? 4 : width.is_text() ? 0 : width.integer();
  TESSERA_CHECK(count <= kMostIndent, "an indent of ", count, " is too large");
  const std::string spaces =
      width.is_text()
          ? width.text()
          : std::string(static_cast<std::size_t>(std::max(count, std::int64_t{0})), ' ');
  std::string out = arguments.at(1, "first") ? spaces : "";
  for (std::size_t i = 0; i < text.size(); ++i) {
    out += text[i];
    out += text[i] == '\n' && i + 1 < text.size() && text[i + 1] != '\n' ? spaces : "";
  }
  return out;
}

}  // namespace tessera::data::chat
