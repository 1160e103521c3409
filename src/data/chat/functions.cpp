// Filters, tests, methods and functions, as Jinja2 and Python have them.

#include "chat/functions.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <string_view>

#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {
namespace {

constexpr std::size_t kMaxElements = 10'000;

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

/// Of ASCII letters.
std::string cased(std::string text, bool upper) {
  for (char& c : text) {
    const bool changes = upper ? c >= 'a' && c <= 'z' : c >= 'A' && c <= 'Z';
    c = changes ? static_cast<char>(c ^ 0x20) : c;
  }
  return text;
}

/// `every`: each word, else the first.
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
  for (std::size_t at = text.find(from); at != text.npos; at = text.find(from)) {
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
    while (text.find_first_not_of(kSpaces) != text.npos) {
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
  for (std::size_t at = text.find(between); at != text.npos && left-- != 0;
       at = text.find(between)) {
    parts.push_back(std::string(text.substr(0, at)));
    text.remove_prefix(at + between.size());
  }
  parts.push_back(std::string(text));
  return parts;
}

/// Whether a text begins, or ends, with one of some.
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

/// "a.b" of an element.
Value path_of(Value value, const std::string& path) {
  for (const Value& key : Value(split(path, Value("."), {})).elements()) {
    value = value.item(key);
  }
  return value;
}

/// select, reject, selectattr, rejectattr.
Value selected(const std::string& name, const Value& list, const Arguments& arguments) {
  const bool by_attribute = name.ends_with("attr");
  const bool keeps = name.starts_with("select");
  const std::size_t test = by_attribute ? 1 : 0;
  Arguments rest;
  for (std::size_t i = test + 1; i < arguments.positional.size(); ++i) {
    rest.positional.push_back(arguments.positional[i]);
  }
  Values kept;
  for (const Value& element : list.elements()) {
    const Value value =
        by_attribute ? path_of(element, arguments.at(0, "attribute").text()) : element;
    bool is_true = static_cast<bool>(value);
    if (arguments.positional.size() > test) {
      const std::string& kind = arguments.positional[test].text();
      const auto result = tested(kind, value, rest);
      TESSERA_CHECK(result, "the test '", printable(kind), "' is not implemented");
      is_true = *result;
    }
    if (is_true == keeps) {
      kept.push_back(element);
    }
  }
  return Value::list(kept);
}

Value mapped(const Value& list, const Arguments& arguments) {
  Values all;
  const Value path = arguments.at(static_cast<std::size_t>(-1), "attribute");
  for (const Value& element : list.elements()) {
    if (path.is_text()) {
      all.push_back(path_of(element, path.text()));
      continue;
    }
    const std::string& name = arguments.at(0, "filter").text();
    const auto result = filtered(
        name, element, {{arguments.positional.begin() + 1, arguments.positional.end()}, {}});
    TESSERA_CHECK(result, "the filter '", printable(name), "' is not implemented");
    all.push_back(*result);
  }
  return Value::list(all);
}

bool is_before(const Json& a, const Json& b) {
  return a < b;
}

Value sorted(const Value& list, const Arguments& arguments) {
  Values all = list.elements();
  const Value path = arguments.at(2, "attribute");
  const auto key = [&](const Value& value) {
    return path.is_text() ? path_of(value, path.text()).json() : value.json();
  };
  std::ranges::stable_sort(all, is_before, key);
  if (arguments.at(0, "reverse")) {
    std::ranges::reverse(all);
  }
  return Value::list(all);
}

Value reversed(const Value& value) {
  Values all = value.elements();
  std::ranges::reverse(all);
  return value.is_text() ? Value(joined(Value::list(all), "")) : Value::list(all);
}

Value unique(const Value& list) {
  Values all;
  for (const Value& value : list.elements()) {
    if (std::ranges::none_of(all, [&](const Value& known) { return known.equals(value); })) {
      all.push_back(value);
    }
  }
  return Value::list(all);
}

Value whole_number(const Value& value) {
  if (!value.is_text()) {
    return Json(static_cast<std::int64_t>(value.number()));
  }
  const std::string text = stripped(value.text(), {}, true, true);
  const bool is_number =
      !text.empty() && text.find_first_not_of("0123456789", text[0] == '-') == text.npos;
  return Json(is_number && text.size() < 18 ? std::stoll(text) : 0LL);
}

Value range(const Arguments& arguments) {
  const Values& given = arguments.positional;
  TESSERA_CHECK(!given.empty() && given.size() <= 3, "range() takes one to three numbers");
  const std::int64_t begin = given.size() > 1 ? given[0].integer() : 0;
  const std::int64_t end = given[given.size() > 1 ? 1 : 0].integer();
  const std::int64_t step = given.size() > 2 ? given[2].integer() : 1;
  TESSERA_CHECK(step != 0, "range() takes no step of 0");
  Json all = Json::array();
  for (std::int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    TESSERA_CHECK(all.size() < kMaxElements, "a range() has more than ", kMaxElements, " elements");
    all.push_back(i);
  }
  return all;
}

Value strftime_now(const Arguments& arguments) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 256> text{};
  const std::size_t size =
      std::strftime(text.data(), text.size(), arguments.at(0, "format").text().c_str(), &local);
  return Json(std::string(text.data(), size));
}

Value text_method(const std::string& text, const std::string& name) {
  const auto method = [&](auto body) {
    return Value::function(
        [text, body](const Arguments& arguments) -> Value { return Json(body(text, arguments)); });
  };
  using A = Arguments;
  using S = std::string;
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    return method([name](const S& t, const A& a) {
      return stripped(t, a.at(0, "chars"), name != "rstrip", name != "lstrip");
    });
  }
  if (name == "split") {
    return method(
        [](const S& t, const A& a) { return split(t, a.at(0, "sep"), a.at(1, "maxsplit")); });
  }
  if (name == "startswith" || name == "endswith") {
    return method(
        [name](const S& t, const A& a) { return has_affix(t, a.at(0, ""), name[0] == 's'); });
  }
  if (name == "replace") {
    return method(
        [](const S& t, const A& a) { return replaced(t, a.at(0, "").text(), a.at(1, "").text()); });
  }
  if (name == "upper" || name == "lower") {
    return method([name](const S& t, const A&) { return cased(t, name == "upper"); });
  }
  if (name == "title" || name == "capitalize") {
    return method([name](const S& t, const A&) { return capitalized(t, name == "title"); });
  }
  if (name == "join") {
    return method([](const S& t, const A& a) { return joined(a.at(0, ""), t); });
  }
  if (name == "find") {
    return method([](const S& t, const A& a) {
      const std::size_t at = t.find(a.at(0, "").text());
      return at == t.npos ? std::int64_t{-1} : length_of(Json(t.substr(0, at)));
    });
  }
  return Value::undefined(name);
}

Value map_method(const Value& map, const std::string& name) {
  if (name == "items") {
    return Value::function([map](const Arguments&) -> Value { return items_of(map); });
  }
  if (name == "keys") {
    return Value::function([map](const Arguments&) { return Value::list(map.elements()); });
  }
  if (name == "values") {
    return Value::function([map](const Arguments&) {
      Values all;
      for (const Value& key : map.elements()) {
        all.push_back(map.item(key));
      }
      return Value::list(all);
    });
  }
  if (name == "get") {
    return Value::function([map](const Arguments& arguments) -> Value {
      const Value found = map.item(arguments.at(0, "key"));
      const Value otherwise = arguments.at(1, "default");
      return !found.is_undefined() ? found : otherwise.is_undefined() ? Value(Json()) : otherwise;
    });
  }
  return Value::undefined(name);
}

}  // namespace

std::optional<Value> filtered(const std::string& name, const Value& value,
                              const Arguments& arguments) {
  if (name == "default" || name == "d") {
    const bool missing = value.is_undefined() || (arguments.at(1, "boolean") && !value);
    const Value otherwise = arguments.at(0, "default_value");
    return missing ? (otherwise.is_undefined() ? Value(Json("")) : otherwise) : value;
  }
  if (name == "trim") {
    return Json(stripped(value.shown(), arguments.at(0, "chars"), true, true));
  }
  if (name == "tojson") {
    const Value indent = arguments.at(0, "indent");
    return Json(
        dumped(value.json(), indent.is_integer() ? static_cast<int>(indent.integer()) : -1));
  }
  if (name == "length" || name == "count") {
    return Json(length_of(value));
  }
  if (name == "upper" || name == "lower") {
    return Json(cased(value.shown(), name == "upper"));
  }
  if (name == "title" || name == "capitalize") {
    return Json(capitalized(value.shown(), name == "title"));
  }
  if (name == "replace") {
    return Json(
        replaced(value.shown(), arguments.at(0, "old").text(), arguments.at(1, "new").text()));
  }
  if (name == "join") {
    const Value between = arguments.at(0, "d");
    return Json(joined(value, between.is_text() ? between.text() : ""));
  }
  if (name == "first" || name == "last") {
    return value.item(Json(name == "first" ? 0 : -1));
  }
  if (name == "string" || name == "safe") {
    return Json(value.shown());
  }
  if (name == "int") {
    return whole_number(value);
  }
  if (name == "float") {
    return Json(value.is_text() ? std::atof(value.text().c_str()) : value.number());
  }
  if (name == "abs") {
    return value.is_integer() ? Json(std::abs(value.integer())) : Json(std::abs(value.number()));
  }
  if (name == "list") {
    return Value::list(value.elements());
  }
  if (name == "items") {
    return value.is_undefined() ? Value(Json::array()) : Value(items_of(value));
  }
  if (name == "dictsort") {
    return sorted(items_of(value), {});
  }
  if (name == "indent") {
    return Json(indented(value.shown(), arguments));
  }
  if (name == "map") {
    return mapped(value, arguments);
  }
  if (name == "sort") {
    return sorted(value, arguments);
  }
  if (name == "reverse") {
    return reversed(value);
  }
  if (name == "unique") {
    return unique(value);
  }
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") {
    return selected(name, value, arguments);
  }
  return std::nullopt;
}

std::optional<bool> tested(const std::string& name, const Value& value,
                           const Arguments& arguments) {
  const Value other = arguments.at(0, "other");
  if (name == "defined" || name == "undefined") {
    return value.is_undefined() == (name == "undefined");
  }
  if (name == "none") {
    return value.is_none();
  }
  if (name == "string") {
    return value.is_text();
  }
  if (name == "mapping") {
    return value.is_map();
  }
  if (name == "iterable") {
    return value.is_undefined() || value.is_list() || value.is_map() || value.is_text();
  }
  if (name == "sequence") {
    return value.is_list() || value.is_map() || value.is_text();
  }
  if (name == "boolean" || name == "true" || name == "false") {
    const bool is_boolean = value.is_json() && value.json().is_boolean();
    return is_boolean && (name == "boolean" || static_cast<bool>(value) == (name == "true"));
  }
  if (name == "integer") {
    return value.is_integer();
  }
  if (name == "float") {
    return value.is_json() && value.json().is_number_float();
  }
  if (name == "number") {
    return value.is_number();
  }
  if (name == "odd" || name == "even") {
    return (value.integer() % 2 == 0) == (name == "even");
  }
  if (name == "divisibleby") {
    TESSERA_CHECK(other.integer() != 0, "a division by 0");
    return value.integer() % other.integer() == 0;
  }
  if (name == "equalto" || name == "eq" || name == "==" || name == "sameas") {
    return value.equals(other);
  }
  if (name == "ne" || name == "!=") {
    return !value.equals(other);
  }
  if (name == "in") {
    return other.is_text() ? other.text().find(value.text()) != std::string::npos
                           : std::ranges::any_of(other.elements(), [&](const Value& element) {
                               return element.equals(value);
                             });
  }
  if (name == "callable") {
    return !value.is_undefined() && !value.is_json() && value.fields() == nullptr;
  }
  return std::nullopt;
}

Value attribute(const Value& value, const std::string& name) {
  TESSERA_CHECK(!value.is_undefined(), "'", printable(name), "' is asked of ", value.kind());
  if (value.is_text()) {
    return text_method(value.text(), name);
  }
  if (value.is_map()) {
    const Value method = map_method(value, name);
    return method.is_undefined() ? value.item(Json(name)) : method;
  }
  return value.fields() != nullptr ? value.item(Json(name)) : Value::undefined(name);
}

Fields global_functions() {
  return {{"range", Value::function(range)},
          {"namespace", Value::function([](const Arguments& a) { return Value::space(a.named); })},
          {"dict", Value::function([](const Arguments& arguments) -> Value {
             Json map = Json::object();
             for (const auto& [key, value] : arguments.named) {
               map[key] = value.json();
             }
             return map;
           })},
          {"raise_exception", Value::function([](const Arguments& a) -> Value {
             fail("the chat template says: ", printable(a.at(0, "message").shown()));
           })},
          {"strftime_now", Value::function(strftime_now)}};
}

}  // namespace tessera::data::chat
