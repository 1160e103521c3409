#include "chat/value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <limits>
#include <utility>

#include "tessera/core/error.h"
#include "unicode/properties.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {
namespace {

/// As Python's ==: true is 1, and the order of keys says nothing.
bool are_equal(const Json& a, const Json& b) {
  if (a.is_boolean() != b.is_boolean() && (a.is_number() || b.is_number())) {
    return are_equal(a.is_boolean() ? Json(a.get<bool>() ? 1 : 0) : a,
                     b.is_boolean() ? Json(b.get<bool>() ? 1 : 0) : b);
  }
  if (a.is_array() && b.is_array()) {
    return std::ranges::equal(a, b, are_equal);
  }
  if (!a.is_object() || !b.is_object()) {
    return a == b;
  }
  const auto is_in_b = [&](const auto& item) {
    return b.contains(item.first) && are_equal(item.second, b.at(item.first));
  };
  const auto& items = a.get_ref<const Json::object_t&>();
  return a.size() == b.size() && std::ranges::all_of(items, is_in_b);
}

/// As Python's str.isprintable() has it.
bool is_printable(char32_t code) {
  static const CodeSet hidden = [] {
    CodeSet all;
    for (const char* category : {"cc", "cf", "cn", "co", "separator"}) {
      all.add(unicode_property(category).value());
    }
    return all;
  }();
  return code == ' ' || !hidden.contains(code);
}

/// "\x1b", "\u200b", "\U000e0001".
std::string escaped(char32_t code) {
  const auto [kind, digits] = code <= 0xff     ? std::pair('x', 2)
                              : code <= 0xffff ? std::pair('u', 4)
                                               : std::pair('U', 8);
  std::array<char, 12> text{};
  std::snprintf(text.data(), text.size(), "\\%c%0*x", kind, digits, static_cast<unsigned>(code));
  return text.data();
}

/// As Python's repr(): all digits unless the number is very large or small.
std::string number_text(double number) {
  constexpr double kLeast = 1e-4;
  constexpr double kMost = 1e16;
  const double size = std::abs(number);
  const bool is_plain = size == 0 || (size >= kLeast && size < kMost);
  std::array<char, 32> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), number,
                    is_plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string out(text.data(), end.ptr);
  return is_plain && out.find('.') == std::string::npos ? out + ".0" : out;
}

std::string plain(const Json& json, bool ascii) {
  return json.is_number_float() ? number_text(json.get<double>()) : json.dump(-1, ' ', ascii);
}

std::string quoted(const std::string& text) {
  const char quote =
      text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view character = rest.substr(0, first_character(rest).bytes);
    rest.remove_prefix(character.size());
    const char first = character[0];
    if (const auto known = std::string_view("\n\t\r").find(first); known != std::string::npos) {
      out += std::string("\\") + "ntr"[known];
    } else if (const char32_t code = code_point(character); !is_printable(code)) {
      out += escaped(code);
    } else {
      out += first == quote || first == '\\' ? "\\" : "";
      out += character;
    }
  }
  return out + quote;
}

}  // namespace

Value Arguments::at(std::size_t place, const std::string& name) const {
  if (place < positional.size()) {
    return positional[place];
  }
  const auto found = std::ranges::find(named, name, &std::pair<std::string, Value>::first);
  return found == named.end() ? Value::undefined(name) : found->second;
}

void Arguments::require(const std::string& what,
                        const std::vector<std::string_view>& parameters) const {
  TESSERA_CHECK(positional.size() <= parameters.size(), "the argument ", parameters.size() + 1,
                " of ", what, " is not implemented");
  for (const auto& [name, unused] : named) {
    const auto parameter = std::ranges::find(parameters, name);
    TESSERA_CHECK(!name.empty() && parameter != parameters.end(), "the argument '", printable(name),
                  "' of ", what, " is not implemented");
    TESSERA_CHECK(parameter - parameters.begin() >= std::ssize(positional), "the argument '", name,
                  "' of ", what, " is given twice");
  }
}

Value Value::list(const Values& values) {
  Json list = Json::array();
  for (const Value& value : values) {
    list.push_back(value.json());
  }
  return list;
}

std::string Value::kind() const {
  if (is_undefined()) {
    return name_.empty() ? "undefined" : "'" + printable(name_) + "', which is undefined";
  }
  return json_ ? json_->type_name() : fields_ ? "a namespace" : "a function";
}

const Json& Value::json() const {
  TESSERA_CHECK(json_, "a value is needed, but it is ", kind());
  return *json_;
}

const std::string& Value::text() const {
  TESSERA_CHECK(is_text(), "a text is needed, but it is ", kind());
  return json_->get_ref<const std::string&>();
}

std::int64_t Value::integer() const {
  TESSERA_CHECK(json_ && (is_integer() || json_->is_boolean()),
                "a whole number is needed, but it is ", kind());
  TESSERA_CHECK(!json_->is_number_unsigned() ||
                    json_->get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max(),
                "a whole number of up to 63 bits is needed, but it is ", *json_);
  return json_->is_boolean() ? (json_->get<bool>() ? 1 : 0) : json_->get<std::int64_t>();
}

double Value::number() const {
  TESSERA_CHECK(json_ && (is_number() || json_->is_boolean()), "a number is needed, but it is ",
                kind());
  return json_->is_boolean() ? static_cast<double>(integer()) : json_->get<double>();
}

Value Value::call(const Arguments& arguments) const {
  TESSERA_CHECK(function_, "a function is needed, but it is ", kind());
  return (*function_)(arguments);
}

Values Value::elements() const {
  Values all;
  if (is_undefined()) {
    return all;
  }
  const Json& whole = json();
  if (whole.is_array()) {
    for (const Json& element : whole) {
      all.push_back(part(element));
    }
    return all;
  }
  if (whole.is_object()) {
    for (const auto& [key, value] : whole.items()) {
      all.emplace_back(key);
    }
    return all;
  }
  std::string_view rest = text();
  while (!rest.empty()) {
    const std::string_view character = rest.substr(0, first_character(rest).bytes);
    all.emplace_back(std::string(character));
    rest.remove_prefix(character.size());
  }
  return all;
}

Value::operator bool() const {
  if (!json_) {
    return !is_undefined();
  }
  switch (json_->type()) {
    case Json::value_t::null:
      return false;
    case Json::value_t::boolean:
      return json_->get<bool>();
    case Json::value_t::string:
      return !text().empty();
    case Json::value_t::array:
    case Json::value_t::object:
      return !json_->empty();
    default:
      return json_->get<double>() != 0;
  }
}

bool Value::equals(const Value& other) const {
  if (json_ && other.json_) {
    return are_equal(*json_, *other.json_);
  }
  return is_undefined() && other.is_undefined();
}

Value Value::part(const Json& json) const {
  Value value;
  value.json_ = std::shared_ptr<const Json>(json_, &json);
  return value;
}

Value Value::item(const Value& key) const {
  TESSERA_CHECK(!is_undefined(), "an element is asked of ", kind());
  if (fields_) {
    const auto found = fields_->find(key.text());
    return found == fields_->end() ? undefined(key.text()) : found->second;
  }
  if (is_map()) {
    const auto found = key.is_text() ? json_->find(key.text()) : json_->end();
    return found == json_->end() ? undefined(key.shown()) : part(*found);
  }
  if (!key.is_integer() || !(is_list() || is_text())) {
    return undefined(key.shown());
  }
  const Values all = is_text() ? elements() : Values{};
  const auto size = static_cast<std::int64_t>(is_text() ? all.size() : json_->size());
  const std::int64_t place = key.integer() < 0 ? key.integer() + size : key.integer();
  if (place < 0 || place >= size) {
    return undefined(key.shown());
  }
  const auto at = static_cast<std::size_t>(place);
  return is_text() ? all[at] : part((*json_)[at]);
}

std::string Value::shown() const {
  if (is_undefined()) {
    return "";
  }
  return is_text() ? text() : represented(json());
}

std::string represented(const Json& json) {
  if (json.is_null()) {
    return "None";
  }
  if (json.is_boolean()) {
    return json.get<bool>() ? "True" : "False";
  }
  if (json.is_string()) {
    return quoted(json.get<std::string>());
  }
  if (!json.is_structured()) {
    return plain(json, /*ascii=*/false);
  }
  std::string out;
  for (const auto& [key, value] : json.items()) {
    out += (out.empty() ? "" : ", ") + (json.is_object() ? quoted(key) + ": " : "") +
           represented(value);
  }
  return json.is_object() ? "{" + out + "}" : "[" + out + "]";
}

std::string dumped(const Json& json, const DumpStyle& style, int depth) {
  if (!json.is_structured() || json.empty()) {
    return plain(json, style.ascii);
  }
  const auto line = [&](int level) {
    return style.indent < 0
               ? ""
               : "\n" + std::string(static_cast<std::size_t>(style.indent * level), ' ');
  };
  std::vector<std::pair<std::string, const Json*>> entries;
  for (const auto& [key, value] : json.items()) {
    entries.emplace_back(key, &value);
  }
  if (style.sorts && json.is_object()) {
    std::ranges::sort(entries, {}, [](const auto& entry) { return entry.first; });
  }
  std::string out;
  for (const auto& [key, value] : entries) {
    out += (out.empty() ? "" : style.comma) + line(depth + 1) +
           (json.is_object() ? plain(key, style.ascii) + style.colon : "") +
           dumped(*value, style, depth + 1);
  }
  out += line(depth);
  return json.is_object() ? "{" + out + "}" : "[" + out + "]";
}

}  // namespace tessera::data::chat
