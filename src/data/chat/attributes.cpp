// Methods and functions, as Python has them.

#include <array>
#include <ctime>

#include "chat/functions.h"
#include "chat/texts.h"
#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {
namespace {

constexpr std::size_t kMaxElements = 10'000;

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
      return at == std::string::npos ? std::int64_t{-1} : length_of(Json(t.substr(0, at)));
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
