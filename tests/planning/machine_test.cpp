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

TEST(Machine, ProductsInEightBitsAreAsFastAsInSixteenUntilTheirShareIsGiven) {
  planning::Machine machine = planning::machine_of("h200");
  const auto type = c10::ScalarType::Float8_e4m3fn;
  EXPECT_EQ(machine.product_flops(type), machine.product_flops(c10::kBFloat16));
  machine.fp8_share = 0.5;
  EXPECT_EQ(machine.product_flops(type), 0.5 * 1979e12);
}

TEST(Machine, AttentionWithSmallHeadsHasItsOwnShare) {
  planning::Machine machine = planning::machine_of("h200");
  machine.attention_share = 0.5;
  machine.attention_share_64 = 0.25;
  EXPECT_EQ(machine.attention_flops(c10::kBFloat16, 64), 0.25 * 989e12);
  EXPECT_EQ(machine.attention_flops(c10::kBFloat16, 128), 0.5 * 989e12);
}

TEST(Machine, NamesTheSourceOfItsShares) {
  const testing::TemporaryFolder dir;
  const std::string file = (dir.path() / "m.toml").string();
  const auto source = [&](const std::string& text) {
    std::ofstream(file) << "like = \"h100\"\n" << text;
    return planning::machine_of(file).shares_from;
  };
  EXPECT_EQ(source("network_bandwidth = 1e9\n"), planning::machine_of("h200").shares_from);
  EXPECT_EQ(source("attention_share_64 = 0.4\n"),
            planning::machine_of("h200").shares_from + ", attention_share_64 of " + file);
  EXPECT_EQ(source("product_share = 0.7\nshares_from = \"our H100\"\n"), "our H100");
}

TEST(Machine, ACollectiveMustLeaveMultiprocessors) {
  const testing::TemporaryFolder dir;
  const std::string file = (dir.path() / "m.toml").string();
  std::ofstream(file) << "like = \"h100\"\ncollective_multiprocessors = 132\n";
  EXPECT_ERROR(planning::machine_of(file), "\"collective_multiprocessors\" is 132");
}

TEST(Machine, AnUnknownNameIsAnErrorWithTheNamesThatAreKnown) {
  EXPECT_ERROR(planning::machine_of("h201"), "machine h201 is not known; pass a100, h100");
  EXPECT_ERROR(planning::machine_of("h201", "--gpu"), "--gpu h201 is not known");
}

}  // namespace
}  // namespace tessera
