// Helpers for tests of errors, for tables of refused calls, and for names of test cases.

#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::testing {

/// Succeeds if `text` contains all `parts`. Otherwise the message names a missing part.
inline ::testing::AssertionResult Contains(std::string_view text,
                                           const std::vector<std::string_view>& parts) {
  for (const std::string_view part : parts) {
    if (text.find(part) == std::string_view::npos) {
      return ::testing::AssertionFailure() << "'" << part << "' is not in: " << text;
    }
  }
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult Contains(const std::vector<std::string>& texts,
                                           const std::vector<std::string_view>& parts) {
  for (const std::string& text : texts) {
    if (const auto outcome = Contains(text, parts); !outcome) {
      return outcome;
    }
  }
  return ::testing::AssertionSuccess();
}

/// Succeeds if `call` throws a Thrown whose message contains all `parts`. A tessera::Error must
/// have a message of one line.
template <class Thrown, class Call>
::testing::AssertionResult Throws(Call&& call, const std::vector<std::string_view>& parts) {
  try {
    call();
  } catch (const std::exception& error) {
    const std::string message = error.what();
    if (dynamic_cast<const Thrown*>(&error) == nullptr) {
      return ::testing::AssertionFailure() << "an error of another type was thrown: " << message;
    }
    if (std::is_base_of_v<Error, Thrown> && message.find('\n') != std::string::npos) {
      return ::testing::AssertionFailure() << "the message has several lines: " << message;
    }
    return Contains(message, parts);
  }
  return ::testing::AssertionFailure() << "no error was thrown";
}

/// Returns the message of the exception that `call` throws; "" without an exception.
template <class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// A call that must throw an Error whose message contains all `words`.
struct Refusal {
  std::string name;
  std::function<void()> act;
  std::vector<std::string_view> words;
};

inline void expect_refusals(const std::vector<Refusal>& rows) {
  for (const Refusal& row : rows) {
    EXPECT_TRUE(Throws<Error>(row.act, row.words)) << row.name;
  }
}

}  // namespace tessera::testing

// The switch prevents a compiler warning about a dangling `else` for `if (x) EXPECT_EQUAL(a, b);`.
#define TESSERA_EXPECT(outcome, what)                                   \
  switch (0)                                                            \
  case 0:                                                               \
  default:                                                              \
    if (const ::testing::AssertionResult tessera_outcome = (outcome)) { \
    } else                                                              \
      ADD_FAILURE() << what << ": " << tessera_outcome.failure_message()

/// EXPECT_CONTAINS(text, parts...): `text`, or each text of a vector, must contain all parts.
#define EXPECT_CONTAINS(text, ...) \
  TESSERA_EXPECT(::tessera::testing::Contains(text, {__VA_ARGS__}), #text)

/// EXPECT_THROWN(type, expression, parts...): the message of the exception must contain all parts.
/// Choose parts that other errors of the expression do not contain.
#define EXPECT_THROWN(type, expression, ...)                                                   \
  TESSERA_EXPECT(::tessera::testing::Throws<type>([&] { (void)(expression); }, {__VA_ARGS__}), \
                 #expression)

/// EXPECT_ERROR(expression, parts...): EXPECT_THROWN() for tessera::Error.
#define EXPECT_ERROR(expression, ...) EXPECT_THROWN(::tessera::Error, expression, __VA_ARGS__)

namespace tessera::testing {

/// Returns the `name` of a test case, with _ in place of characters that GoogleTest refuses.
template <class Case>
std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.name;
  std::ranges::replace_if(name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

}  // namespace tessera::testing
