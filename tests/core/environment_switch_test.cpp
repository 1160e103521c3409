#include "tessera/core/detail/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "testing/errors.h"

namespace tessera::detail {
namespace {

constexpr auto kName = "TESSERA_SWITCH_OF_A_TEST";

class EnvironmentSwitch : public ::testing::Test {
 protected:
  void TearDown() override { unsetenv(kName); }
};

TEST_F(EnvironmentSwitch, IsReadOneWay) {
  for (const char* on : {"1", "true", "on"}) {
    setenv(kName, on, 1);
    EXPECT_EQ(environment_switch(kName), true) << on;
  }
  for (const char* off : {"0", "false", "off"}) {
    setenv(kName, off, 1);
    EXPECT_EQ(environment_switch(kName), false) << off;
  }
}

TEST_F(EnvironmentSwitch, SaysNothingWhereItIsNotSetOrEmpty) {
  EXPECT_EQ(environment_switch(kName), std::nullopt);
  setenv(kName, "", 1);
  EXPECT_EQ(environment_switch(kName), std::nullopt);
}

TEST_F(EnvironmentSwitch, RefusesOtherValues) {
  setenv(kName, "yes", 1);
  EXPECT_ERROR(environment_switch(kName),
               "environment variable TESSERA_SWITCH_OF_A_TEST=yes: not a switch; set it to 1, "
               "true or on, or to 0, false or off");
}

}  // namespace
}  // namespace tessera::detail
