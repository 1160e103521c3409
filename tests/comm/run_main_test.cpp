// How a program ends that does not catch.

#include "tessera/comm/world.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

TEST(RunMain, ReturnsZeroOfABodyThatEnds) {
  bool ran = false;
  EXPECT_EQ(run_main([&] { ran = true; }), 0);
  EXPECT_TRUE(ran);
}

TEST(RunMainDeathTest, EndsWithOneLineOfAnError) {
  EXPECT_EXIT(run_main([] { fail("rows are missing"); }), ::testing::ExitedWithCode(1),
              "^error: rows are missing\n$");
}

TEST(RunMainDeathTest, LeavesOutLibtorchsStack) {
  EXPECT_EXIT(run_main([] { at::mm(at::ones({2, 3}), at::ones({2, 3})); }),
              ::testing::ExitedWithCode(1), "^error: [^\n]*mat1 and mat2 shapes[^\n]*\n$");
}

TEST(RunMainDeathTest, LeavesOutTheStackOfMemoryThatIsNotThere) {
  EXPECT_EXIT(run_main([] { at::ones({std::int64_t{1} << 46}); }), ::testing::ExitedWithCode(1),
              "(^|\n)error: [^\n]*can't allocate memory[^\n]*Cannot allocate memory[^\n]{0,2}\n$");
}

TEST(RunMainDeathTest, NamesTheRankWhereTheLauncherDoesNot) {
  const auto body = [] {
    unsetenv("TESSERA_JOB_TOKEN");
    setenv("RANK", "2", 1);
    setenv("WORLD_SIZE", "4", 1);
    setenv("MASTER_ADDR", "localhost", 1);
    setenv("MASTER_PORT", "1", 1);
    fail("rows are missing");
  };
  EXPECT_EXIT(run_main(body), ::testing::ExitedWithCode(1), "rank 2 of 4: error: rows are missing");
}

}  // namespace
}  // namespace tessera::comm
