#include "tessera/planning/machine.h"

#include <gtest/gtest.h>

#include <fstream>

#include "testing/errors.h"
#include "testing/files.h"

namespace tessera {
namespace {

TEST(Machine, AFileBeginsFromAKnownOne) {
  const testing::TemporaryFolder dir;
  const std::string file = (dir.path() / "m.toml").string();
  std::ofstream(file) << "like = \"h200\"\nname = \"slow\"\nnetwork_bandwidth = 1e9\n";
  const planning::Machine machine = planning::machine_of(file);
  EXPECT_EQ(machine.name, "slow");
  EXPECT_EQ(machine.network_bandwidth, 1e9);
  EXPECT_EQ(machine.memory_bytes, planning::machine_of("h200").memory_bytes);
}

TEST(Machine, MultipliesEightBitsAtTheirRateOrAsSixteen) {
  const planning::Machine with = planning::machine_of("h200"),
                          without = planning::machine_of("a100");
  EXPECT_EQ(with.peak_flops(c10::ScalarType::Float8_e4m3fn), 1979e12);
  EXPECT_EQ(with.peak_flops(c10::kBFloat16), 989e12);
  EXPECT_EQ(without.peak_flops(c10::ScalarType::Float8_e4m3fn), 312e12);
}

TEST(Machine, AnUnknownNameIsAnErrorWithTheNamesThatAreKnown) {
  EXPECT_ERROR(planning::machine_of("h201"), "machine h201 is not known; pass a100, h100");
  EXPECT_ERROR(planning::machine_of("h201", "--gpu"), "--gpu h201 is not known");
}

}  // namespace
}  // namespace tessera
