// Methods and functions, as Python has them.

#include <array>
#include <ctime>

#include "chat/cases.h"
#include "chat/functions.h"
#include "chat/texts.h"
#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {
namespace {

constexpr std::size_t kMaxElements = 10'000;

Value range(const Arguments& arguments) {
  arguments.require("range()", {"", "", ""});
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
  arguments.require("strftime_now()", {"format"});
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 256> text{};
  const std::size_t size =
      std::strftime(text.data(), text.size(), arguments.at(0, "format").text().c_str(), &local);
  return Json(std::string(text.data(), size));
}

/// A mapping, if one is given, with what is named.
Json new_map(const Arguments& arguments) {
  TESSERA_CHECK(arguments.positional.size() <= 1, "the argument 2 of dict() is not implemented");
  Json map = Json::object();
  if (!arguments.positional.empty()) {
    const Value& base = arguments.positional[0];
    TESSERA_CHECK(base.is_map(), "a mapping is needed, but it is ", base.kind());
    map = base.json();
  }
  for (const auto& [key, value] : arguments.named) {
    map[key] = value.json();
  }
  return map;
}

Value new_space(const Arguments& arguments) {
  TESSERA_CHECK(arguments.positional.empty(), "the argument 1 of namespace() is not implemented");
  return Value::space({arguments.named.begin(), arguments.named.end()});
}

/// A method, and how many arguments it takes: Python's have no names, but for split().
template <class Body>
Value method(const std::string& name, const std::vector<std::string_view>& parameters, Body body) {
  return Value::function([name, parameters, body](const Arguments& arguments) -> Value {
    arguments.require(name + "()", parameters);
    return body(arguments);
  });
}

Value case_method(const std::string& text, const std::string& name) {
  return method(name, {}, [text, name](const Arguments&) -> Value {
    return Json(name == "upper"   ? uppered(text, name)
                : name == "lower" ? lowered(text)
                : name == "title" ? titled(text, name)
                                  : capitalized(text, name));
  });
}

Value find_method(const std::string& text) {
  return method("find", {""}, [text](const Arguments& a) -> Value {
    const std::size_t at = text.find(a.at(0, "").text());
    return Json(at == std::string::npos ? std::int64_t{-1} : length_of(Json(text.substr(0, at))));
  });
}

Value text_method(const std::string& text, const std::string& name) {
  using A = Arguments;
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    return method(name, {""}, [text, name](const A& a) -> Value {
      return Json(stripped(text, a.at(0, ""), name != "rstrip", name != "lstrip"));
    });
  }
  if (name == "split") {
    return method(name, {"sep", "maxsplit"}, [text](const A& a) -> Value {
      return split(text, a.at(0, "sep"), a.at(1, "maxsplit"));
    });
  }
  if (name == "startswith" || name == "endswith") {
    return method(name, {""}, [text, name](const A& a) -> Value {
      return Json(has_affix(text, a.at(0, ""), name[0] == 's'));
    });
  }
  if (name == "replace") {
    return method(name, {"", "", ""}, [text](const A& a) -> Value {
      return Json(replaced(text, a.at(0, "").text(), a.at(1, "").text(), a.at(2, "")));
    });
  }
  if (name == "upper" || name == "lower" || name == "title" || name == "capitalize") {
    return case_method(text, name);
  }
  if (name == "join") {
    return method(name, {""},
                  [text](const A& a) -> Value { return Json(joined(a.at(0, ""), text)); });
  }
  if (name == "find") {
    return find_method(text);
  }
  return Value::undefined(name);
}

Values values_of(const Value& map) {
  Values all;
  for (const Value& key : map.elements()) {
    all.push_back(map.item(key));
  }
  return all;
}

Value map_method(const Value& map, const std::string& name) {
  using A = Arguments;
  if (name == "items") {
    return method(name, {}, [map](const A&) -> Value { return items_of(map); });
  }
  if (name == "keys") {
    return method(name, {}, [map](const A&) { return Value::list(map.elements()); });
  }
  if (name == "values") {
    return method(name, {}, [map](const A&) { return Value::list(values_of(map)); });
  }
  if (name == "get") {
    return method(name, {"", ""}, [map](const A& arguments) -> Value {
      const Value found = map.item(arguments.at(0, ""));
      const Value otherwise = arguments.at(1, "");
      return !found.is_undefined() ? found : otherwise.is_undefined() ? Value(Json()) : otherwise;
    });
  }
  return Value::undefined(name);
}

}  // namespace

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
          {"namespace", Value::function(new_space)},
          {"dict",
           Value::function([](const Arguments& arguments) -> Value { return new_map(arguments); })},
          {"raise_exception", Value::function([](const Arguments& arguments) -> Value {
             arguments.require("raise_exception()", {"message"});
             fail("the chat template says: ", printable(arguments.at(0, "message").shown()));
           })},
          {"strftime_now", Value::function(strftime_now)}};
}

}  // namespace tessera::data::chat
