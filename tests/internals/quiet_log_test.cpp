// Canary: the form of the lines of libtorch's log, by which some are held back.
#include "tessera/internals/detail/quiet_log.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <gtest/gtest.h>

#include <iostream>
#include <string>

namespace tessera::detail {
namespace {

template <class Write>
std::string written(Write&& write) {
  ::testing::internal::CaptureStderr();
  write();
  return ::testing::internal::GetCapturedStderr();
}

std::string error_of(const char* file) {
  return written([file] { LOG_AT_FILE_LINE(ERROR, file, 7) << "a stack\nin lines"; });
}

TEST(QuietLogCanary, HoldsBackWhatTheStoreAndTheGroupsOfNcclLog) {
  const QuietLog quiet;
  EXPECT_EQ(error_of("/torch/c10d/ProcessGroupNCCL.cpp"), "");
  EXPECT_EQ(error_of("/torch/c10d/TCPStore.cpp"), "");
  const auto warn = [] { LOG_AT_FILE_LINE(WARNING, "c10d/socket.cpp", 7) << "no peer"; };
  EXPECT_EQ(written(warn), "");
}

TEST(QuietLogCanary, LetsAllElsePass) {
  const QuietLog quiet;
  EXPECT_NE(error_of("/torch/c10d/reducer.cpp").find("a stack\nin lines"), std::string::npos);
  const auto warn = [] { LOG_AT_FILE_LINE(WARNING, "ProcessGroupNCCL.cpp", 7) << "no device"; };
  EXPECT_NE(written(warn).find("no device"), std::string::npos);
  EXPECT_NE(written([] { TORCH_WARN("seldom used"); }).find("seldom used"), std::string::npos);
  EXPECT_EQ(written([] { std::cerr << "[E" << 1 << ' ' << 'x' << std::endl; }), "[E1 x\n");
}

TEST(QuietLogCanary, EndsWithTheLastScope) {
  {
    const QuietLog quiet;
    { const QuietLog inner; }
    EXPECT_EQ(error_of("TCPStore.cpp"), "");
  }
  EXPECT_NE(error_of("TCPStore.cpp").find("TCPStore.cpp:7] a stack"), std::string::npos);
}

}  // namespace
}  // namespace tessera::detail
