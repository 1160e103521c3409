// Filters and tests, as Jinja2 has them.

#include "chat/functions.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string_view>
#include <vector>

#include "chat/cases.h"
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

/// The argument `first` names a filter or test, which those behind it are for.
Arguments behind(const Arguments& arguments, std::size_t first) {
  const auto begin = arguments.positional.begin() + static_cast<std::ptrdiff_t>(first) + 1;
  return {{begin, arguments.positional.end()}, arguments.named};
}

/// select, reject, selectattr, rejectattr.
Value selected(const std::string& name, const Value& list, const Arguments& arguments) {
  const bool by_attribute = name.ends_with("attr");
  const bool keeps = name.starts_with("select");
  const std::size_t test = by_attribute ? 1 : 0;
  const bool has_test = arguments.positional.size() > test;
  if (!has_test) {
    arguments.require("the filter '" + name + "'", {""});
  }
  const Arguments rest = has_test ? behind(arguments, test) : Arguments();
  Values kept;
  for (const Value& element : list.elements()) {
    const Value value = by_attribute ? path_of(element, arguments.at(0, "").text()) : element;
    auto is_true = static_cast<bool>(value);
    if (has_test) {
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
  const bool by_attribute = arguments.positional.empty();
  if (by_attribute) {
    arguments.require("the filter 'map'", {"attribute", "default"});
  }
  const std::string& name = arguments.at(0, "attribute").text();
  const Value otherwise = by_attribute ? arguments.at(1, "default") : Value();
  const Arguments rest = by_attribute ? Arguments() : behind(arguments, 0);
  Values all;
  for (const Value& element : list.elements()) {
    if (by_attribute) {
      const Value value = path_of(element, name);
      all.push_back(value.is_undefined() ? otherwise : value);
      continue;
    }
    const auto result = filtered(name, element, rest);
    TESSERA_CHECK(result, "the filter '", printable(name), "' is not implemented");
    all.push_back(*result);
  }
  return Value::list(all);
}

/// What filters compare: without case unless they are told otherwise.
struct Key {
  Value attribute;
  bool with_case = false;

  Value operator()(const Value& value) const {
    const Value key =
        attribute.is_undefined() || attribute.is_none() ? value : path_of(value, attribute.text());
    return key.is_text() && !with_case ? Value(Json(lowered(key.text()))) : key;
  }
};

bool is_before(const Value& a, const Value& b) {
  const bool are_alike = (a.is_text() && b.is_text()) || (a.is_list() && b.is_list());
  return are_alike ? a.json() < b.json() : a.number() < b.number();
}

template <class Of>
Value sorted(Values all, bool reverse, Of key) {
  // Equals stay in their order.
  std::ranges::stable_sort(
      all,
      [&](const Value& a, const Value& b) { return reverse ? is_before(b, a) : is_before(a, b); },
      key);
  return Value::list(all);
}

Value sorted_items(const Value& map, const Arguments& arguments) {
  const Value by = arguments.at(1, "by");
  const bool by_key = by.is_undefined() || by.text() == "key";
  TESSERA_CHECK(by_key || by.text() == "value", "a mapping is sorted by 'key' or by 'value'");
  const Key key{{}, static_cast<bool>(arguments.at(0, "case_sensitive"))};
  return sorted(Value(items_of(map)).elements(), static_cast<bool>(arguments.at(2, "reverse")),
                [&](const Value& item) { return key(item.item(Json(by_key ? 0 : 1))); });
}

Value reversed(const Value& value) {
  Values all = value.elements();
  std::ranges::reverse(all);
  return value.is_text() ? Value(joined(Value::list(all), "")) : Value::list(all);
}

Value unique(const Value& list, const Arguments& arguments) {
  const Key key{arguments.at(1, "attribute"), static_cast<bool>(arguments.at(0, "case_sensitive"))};
  Values all;
  Values keys;
  for (const Value& value : list.elements()) {
    const Value own = key(value);
    if (std::ranges::none_of(keys, [&](const Value& known) { return known.equals(own); })) {
      all.push_back(value);
      keys.push_back(own);
    }
  }
  return Value::list(all);
}

/// As Python's float() reads a text: "1_000.5". Nothing for what is no finite number.
std::optional<double> real_number(std::string text) {
  const auto is_digit = [&](std::size_t at) {
    return at < text.size() && text[at] >= '0' && text[at] <= '9';
  };
  for (std::size_t at = text.find('_'); at != std::string::npos; at = text.find('_', at)) {
    if (at == 0 || !is_digit(at - 1) || !is_digit(at + 1)) {
      return std::nullopt;
    }
    text.erase(at, 1);
  }
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const bool is_number = text.find_first_not_of("0123456789+-.eE") == std::string::npos &&
                         !text.empty() && *end == '\0' && std::isfinite(number);
  return is_number ? std::optional(number) : std::nullopt;
}

/// The filters `int` and `float`.
Value number_of(const Value& value, bool whole, const Value& otherwise) {
  if (whole && value.is_integer()) {
    return value;
  }
  std::optional<double> number;
  if (value.is_text()) {
    number = real_number(stripped(value.text(), {}, true, true));
  } else if (!value.is_none() && !value.is_list() && !value.is_map()) {
    number = value.number();
  }
  if (!number) {
    return !otherwise.is_undefined() ? otherwise : whole ? Json(0) : Json(0.0);
  }
  TESSERA_CHECK(!whole || std::abs(*number) < 0x1p53, "a whole number is too large");
  return whole ? Json(static_cast<std::int64_t>(*number)) : Json(*number);
}

DumpStyle dump_style(const Arguments& arguments) {
  const Value indent = arguments.at(1, "indent");
  const Value separators = arguments.at(2, "separators");
  DumpStyle style;
  style.ascii = static_cast<bool>(arguments.at(0, "ensure_ascii"));
  style.sorts = static_cast<bool>(arguments.at(3, "sort_keys"));
  if (!indent.is_undefined() && !indent.is_none()) {
    style.indent = static_cast<int>(indent.integer());
    style.comma = ",";
    TESSERA_CHECK(style.indent >= 0 && style.indent <= 100, "an indent of ", style.indent,
                  " is not implemented");
  }
  if (!separators.is_undefined() && !separators.is_none()) {
    style.comma = separators.item(Json(0)).text();
    style.colon = separators.item(Json(1)).text();
  }
  return style;
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
    return Json(dumped(value.json(), dump_style(arguments)));
  }
  if (name == "length" || name == "count") {
    return Json(length_of(value));
  }
  if (name == "upper" || name == "lower") {
    return Json(name == "upper" ? uppered(value.shown(), name) : lowered(value.shown()));
  }
  if (name == "title" || name == "capitalize") {
    return Json(name == "title" ? titled_words(value.shown(), name)
                                : capitalized(value.shown(), name));
  }
  if (name == "replace") {
    return Json(replaced(value.shown(), arguments.at(0, "old").text(),
                         arguments.at(1, "new").text(), arguments.at(2, "count")));
  }
  if (name == "string" || name == "safe") {
    return Json(value.shown());
  }
  if (name == "int" || name == "float") {
    return number_of(value, name == "int", arguments.at(0, "default"));
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
    const Value path = arguments.at(1, "attribute");
    const Value list = path.is_undefined() ? value : mapped(value, {{}, {{"attribute", path}}});
    return Json(joined(list, arguments.at(0, "d").shown()));
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
    return sorted_items(value, arguments);
  }
  if (name == "map") {
    return mapped(value, arguments);
  }
  if (name == "sort") {
    return sorted(
        value.elements(), static_cast<bool>(arguments.at(0, "reverse")),
        Key{arguments.at(2, "attribute"), static_cast<bool>(arguments.at(1, "case_sensitive"))});
  }
  if (name == "reverse") {
    return reversed(value);
  }
  if (name == "unique") {
    return unique(value, arguments);
  }
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") {
    return selected(name, value, arguments);
  }
  return std::nullopt;
}

/// map, select and their like pass most of theirs on, and look at the others themselves.
bool passes_arguments(const std::string& name) {
  return name == "map" || name.starts_with("select") || name.starts_with("reject");
}

std::vector<std::string_view> filter_parameters(const std::string& name) {
  static const std::map<std::string_view, std::vector<std::string_view>> kAll{
      {"default", {"default_value", "boolean"}},
      {"d", {"default_value", "boolean"}},
      {"trim", {"chars"}},
      {"tojson", {"ensure_ascii", "indent", "separators", "sort_keys"}},
      {"replace", {"old", "new", "count"}},
      {"int", {"default"}},
      {"float", {"default"}},
      {"indent", {"width", "first"}},
      {"join", {"d", "attribute"}},
      {"dictsort", {"case_sensitive", "by", "reverse"}},
      {"sort", {"reverse", "case_sensitive", "attribute"}},
      {"unique", {"case_sensitive", "attribute"}}};
  const auto found = kAll.find(name);
  return found == kAll.end() ? std::vector<std::string_view>{} : found->second;
}

/// Tests that compare with another value.
bool takes_value(const std::string& test) {
  constexpr std::array kAll{"divisibleby", "equalto", "eq", "==", "sameas", "ne", "!=", "in"};
  return std::ranges::find(kAll, test) != kAll.end();
}

bool are_same(const Value& a, const Value& b) {
  return a.equals(b) && a.kind() == b.kind() && a.is_integer() == b.is_integer();
}

}  // namespace

std::optional<Value> filtered(const std::string& name, const Value& value,
                              const Arguments& arguments) {
  std::optional<Value> result = value_filtered(name, value, arguments);
  result = result ? result : list_filtered(name, value, arguments);
  if (result && !passes_arguments(name)) {
    arguments.require("the filter '" + name + "'", filter_parameters(name));
  }
  return result;
}

std::optional<bool> tested(const std::string& name, const Value& value,
                           const Arguments& arguments) {
  using Names = std::vector<std::string_view>;
  arguments.require("the test '" + printable(name) + "'", takes_value(name) ? Names{""} : Names{});
  const Value other = arguments.at(0, "");
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
  if (name == "equalto" || name == "eq" || name == "==") {
    return value.equals(other);
  }
  if (name == "sameas") {
    return are_same(value, other);
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
