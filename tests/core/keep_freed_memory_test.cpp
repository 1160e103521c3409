#include "tessera/core/process.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <vector>

namespace tessera {
namespace {

constexpr std::size_t kBytes = std::size_t{64} << 20;

/// Pages that the system had to clear for a vector of kBytes.
[[maybe_unused]] long pages_cleared() {
  rusage before{};
  getrusage(RUSAGE_SELF, &before);
  const std::vector<char> bytes(kBytes, 1);
  rusage after{};
  getrusage(RUSAGE_SELF, &after);
  EXPECT_EQ(bytes.back(), 1);
  return after.ru_minflt - before.ru_minflt;
}

TEST(KeepFreedMemory, HasTheNextAllocationFindIt) {
#if !defined(__GLIBC__) || defined(TESSERA_SANITIZED)
  GTEST_SKIP() << "memory is not glibc's";
#else
  keep_freed_memory();
  pages_cleared();
  EXPECT_LT(pages_cleared(), static_cast<long>(kBytes / 4096 / 10));
#endif
}

}  // namespace
}  // namespace tessera
