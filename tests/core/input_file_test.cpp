#include "tessera/core/input_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <filesystem>

#include "faults/system_calls.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::files {
namespace {

using testing::SystemCallFault;
using testing::TemporaryFolder;
using testing::WriteFile;

TEST(InputFile, IsReadWholeThroughInterruptedAndShortReads) {
  const TemporaryFolder folder;
  WriteFile(folder / "f", "some text");
  for (const char* fault : {"pread:1:EINTR", "pread:1:short"}) {
    const SystemCallFault planted(folder.path(), fault);
    EXPECT_EQ(read_file(folder / "f", "a text", 100), "some text") << fault;
    EXPECT_EQ(SystemCallFault::calls("pread"), 2) << fault;
  }
}

TEST(InputFile, ShrinkingIsAnError) {
  const TemporaryFolder folder;
  WriteFile(folder / "f", "some text");
  const InputFile file(folder / "f", "a text");
  std::filesystem::resize_file(folder / "f", 4);
  std::array<std::byte, 9> bytes{};
  EXPECT_ERROR(file.read_at(0, bytes), "became shorter while it was read");
}

TEST(InputFile, RefusesAnIrregularFileWithoutWaiting) {
  const TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_ERROR(InputFile(folder / "fifo", "a text"), "fifo' is not a regular file: give a text");
  EXPECT_ERROR(InputFile(folder.path(), "a text"), "is not a regular file");
  EXPECT_ERROR(InputFile(folder / "none", "a text"), "No such file", "give a text that exists");
}

TEST(InputFile, IsNotReadBeyondTheLimit) {
  const TemporaryFolder folder;
  WriteFile(folder / "f", "");
  std::filesystem::resize_file(folder / "f", std::uintmax_t{1} << 40);
  EXPECT_ERROR(read_file(folder / "f", "a text", 1000),
               "has 1099511627776 bytes, more than the 1000 that a text may have");
}

}  // namespace
}  // namespace tessera::files
