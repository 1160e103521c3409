#include "tessera/data/text.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::data {
namespace {

using testing::TemporaryFolder;
using testing::WriteFile;

/// A file of `size` bytes has another sum once one of those at `places` is another.
void ExpectSeen(std::size_t size, const std::vector<std::size_t>& places) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.bin";
  const std::string bytes(size, 'x');
  WriteFile(path, bytes);
  const FileFingerprint before = fingerprint(path);
  EXPECT_EQ(before.name, "a.bin");
  EXPECT_EQ(before.bytes, size);
  for (const std::size_t i : places) {
    std::string changed = bytes;
    changed[i] = 'y';
    WriteFile(path, changed);
    EXPECT_NE(fingerprint(path).sum, before.sum) << i;
  }
}

TEST(Fingerprint, ChangesWithEveryByteOfASmallFile) {
  ExpectSeen(10'000, {0, 4095, 4096, 9'999});
}

TEST(Fingerprint, CoversTheFirstAndLastByteOfALargeFile) {
  ExpectSeen(3'000'001, {0, 3'000'000});
}

TEST(Fingerprint, DoesNotDependOnTheFolder) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "moved");
  WriteFile(folder / "a.bin", "text");
  WriteFile(folder / "moved/a.bin", "text");
  EXPECT_EQ(fingerprint(folder / "a.bin"), fingerprint(folder / "moved/a.bin"));
}

TEST(Fingerprint, ExistsForAnEmptyFile) {
  const TemporaryFolder folder;
  WriteFile(folder / "a.bin", "");
  EXPECT_EQ(fingerprint(folder / "a.bin"), (FileFingerprint{"a.bin", 0, 0}));
}

TEST(Fingerprint, NamesAFileThatCannotBeRead) {
  EXPECT_ERROR(fingerprint("/none/a.bin"), "/none/a.bin");
}

}  // namespace
}  // namespace tessera::data
