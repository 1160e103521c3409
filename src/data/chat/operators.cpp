#include "chat/operators.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "chat/functions.h"
#include "chat/state.h"
#include "tessera/core/error.h"

namespace tessera::data::chat {
namespace {

/// true and false are 1 and 0.
bool is_whole(const Value& value) {
  return value.is_integer() || (value.is_json() && value.json().is_boolean());
}

/// Rounded down, as Python does. `y`: neither 0 nor -1.
std::int64_t quotient(std::int64_t x, std::int64_t y) {
  return x / y - (x % y != 0 && (x < 0) != (y < 0) ? 1 : 0);
}

/// Nothing for what is too large.
std::optional<std::int64_t> power(std::int64_t base, std::int64_t exponent) {
  std::int64_t result = 1;
  for (; exponent > 0; exponent /= 2) {
    const bool too_large = (exponent % 2 == 1 && __builtin_mul_overflow(result, base, &result)) ||
                           (exponent > 1 && __builtin_mul_overflow(base, base, &base));
    if (too_large) {
      return std::nullopt;
    }
  }
  return result;
}

/// Nothing for what is too large. `y`: not 0 where it divides, and not negative as an exponent.
std::optional<std::int64_t> computed(const std::string& sign, std::int64_t x, std::int64_t y) {
  if (sign == "**") {
    return power(x, y);
  }
  if (sign == "%") {
    return y == -1 ? 0 : x - y * quotient(x, y);
  }
  if (sign == "//" && y != -1) {
    return quotient(x, y);
  }
  std::int64_t result = 0;
  const bool too_large = sign == "+"   ? __builtin_add_overflow(x, y, &result)
                         : sign == "-" ? __builtin_sub_overflow(x, y, &result)
                                       : __builtin_mul_overflow(x, y, &result);
  return too_large ? std::nullopt : std::optional(result);
}

}  // namespace

Value arithmetic(const std::string& sign, const Value& a, const Value& b) {
  if (sign == "+" && a.is_text() && b.is_text()) {
    return Json(a.text() + b.text());
  }
  if (sign == "+" && a.is_list() && b.is_list()) {
    Values all = a.elements();
    const Values more = b.elements();
    all.insert(all.end(), more.begin(), more.end());
    return Value::list(all);
  }
  if (sign == "*" && a.is_text()) {
    std::string out;
    for (std::int64_t i = 0; i < b.integer() && out.size() < kMaxTextBytes; ++i) {
      out += a.text();
    }
    return Json(out);
  }
  const double x = a.number();
  const double y = b.number();
  const bool divides = sign == "/" || sign == "//" || sign == "%";
  TESSERA_CHECK(!divides || y != 0, "a division by 0");
  if (is_whole(a) && is_whole(b) && sign != "/" && (sign != "**" || y >= 0)) {
    const auto result = computed(sign, a.integer(), b.integer());
    TESSERA_CHECK(result, a.shown(), " ", sign, " ", b.shown(),
                  " has more than 63 bits; compute with smaller numbers");
    return Json(*result);
  }
  const double result = sign == "+"    ? x + y
                        : sign == "-"  ? x - y
                        : sign == "*"  ? x * y
                        : sign == "/"  ? x / y
                        : sign == "//" ? std::floor(x / y)
                        : sign == "%"  ? x - y * std::floor(x / y)
                                       : std::pow(x, y);
  TESSERA_CHECK(std::isfinite(result), a.shown(), " ", sign, " ", b.shown(),
                " is no finite number; compute with smaller ones");
  return Json(result);
}

bool compared(const std::string& sign, const Value& a, const Value& b) {
  if (sign == "==" || sign == "!=") {
    return a.equals(b) == (sign == "==");
  }
  if (sign == "in" || sign == "not in") {
    return *tested("in", a, {{b}, {}}) == (sign == "in");
  }
  const bool texts = a.is_text() && b.is_text();
  const bool less = texts ? a.text() < b.text() : a.number() < b.number();
  const bool more = texts ? b.text() < a.text() : b.number() < a.number();
  return sign == "<" ? less : sign == ">" ? more : sign == "<=" ? !more : !less;
}

Value sliced(const Value& value, const std::array<Value, 3>& bounds) {
  const Values all = value.elements();
  const auto size = static_cast<std::int64_t>(all.size());
  const auto given = [&](std::size_t i) {
    return !bounds.at(i).is_undefined() && !bounds.at(i).is_none();
  };
  const std::int64_t step = given(2) ? bounds[2].integer() : 1;
  TESSERA_CHECK(step != 0, "a slice has a step of 0");
  const std::int64_t low = step > 0 ? 0 : -1;
  const std::int64_t high = step > 0 ? size : size - 1;
  const auto bound = [&](std::size_t i, std::int64_t otherwise) {
    if (!given(i)) {
      return otherwise;
    }
    const std::int64_t place = bounds.at(i).integer();
    return std::clamp(place < 0 ? place + size : place, low, high);
  };
  const std::int64_t begin = bound(0, step > 0 ? low : high);
  const std::int64_t end = bound(1, step > 0 ? high : low);
  Values some;
  for (std::int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    some.push_back(all[static_cast<std::size_t>(i)]);
  }
  if (!value.is_text()) {
    return Value::list(some);
  }
  std::string text;
  for (const Value& character : some) {
    text += character.text();
  }
  return Json(text);
}

}  // namespace tessera::data::chat
