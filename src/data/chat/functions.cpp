// Filters and tests, as Jinja2 has them.

#include "chat/functions.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "chat/texts.h"
#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {
namespace {

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
    auto is_true = static_cast<bool>(value);
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
      !text.empty() && text.find_first_not_of("0123456789", text[0] == '-') == std::string::npos;
  return Json(is_number && text.size() < 18 ? std::stoll(text) : 0LL);
}

/// The filters of one value: a text, a number, or anything.
std::optional<Value> value_filtered(const std::string& name, const Value& value,
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
  if (name == "indent") {
    return Json(indented(value.shown(), arguments));
  }
  return std::nullopt;
}

/// The filters of lists and mappings.
std::optional<Value> list_filtered(const std::string& name, const Value& value,
                                   const Arguments& arguments) {
  if (name == "join") {
    const Value between = arguments.at(0, "d");
    return Json(joined(value, between.is_text() ? between.text() : ""));
  }
  if (name == "first" || name == "last") {
    return value.item(Json(name == "first" ? 0 : -1));
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

}  // namespace

std::optional<Value> filtered(const std::string& name, const Value& value,
                              const Arguments& arguments) {
  const std::optional<Value> result = value_filtered(name, value, arguments);
  return result ? result : list_filtered(name, value, arguments);
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

}  // namespace tessera::data::chat
