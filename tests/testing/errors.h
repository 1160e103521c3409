#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tessera/core/error.h"

namespace tessera::testing {

/// The message of the tessera::Error that `call` throws; fails the test if it throws none.
template <class Call>
std::string ErrorOf(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a tessera::Error";
  return "";
}

}  // namespace tessera::testing

/// `expression` throws tessera::Error with a message of one line that holds `part`.
#define EXPECT_THAT_ERROR(expression, part)                                        \
  do {                                                                             \
    const auto message = ::tessera::testing::ErrorOf([&] { (void)(expression); }); \
    EXPECT_NE(message.find(part), std::string::npos) << message;                   \
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;                   \
  } while (false)
