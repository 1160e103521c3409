#include <sys/stat.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "faults/system_calls.h"
#include "tessera/core/detail/files.h"
#include "testing/errors.h"
#include "testing/files.h"
#include "testing/processes.h"

namespace tessera::files {
namespace {

using testing::ReadFile;
using testing::SystemCallFault;
using testing::TemporaryFolder;
using testing::WriteFile;
using Names = std::vector<std::string>;

void write_reserved(const std::filesystem::path& path, const std::string& text) {
  AtomicFile file(path);
  file.reserve(text.size());
  file.write_at(0, std::as_bytes(std::span(text)));
  file.sync();
  file.publish();
}

int calls_of_one_file(const std::filesystem::path& folder) {
  const SystemCallFault counted(folder, "");
  write_reserved(folder / "f", "older");
  int calls = 0;
  for (const char* call : {"openat", "pwrite", "fsync", "fallocate", "rename", "unlink", "close"}) {
    calls += SystemCallFault::calls(call);
  }
  return calls;
}

TEST(AtomicFile, ContinuesAfterInterruptedCallsAndShortWrites) {
  for (const std::string fault :
       {"fallocate:1:EINTR", "pwrite:1:EINTR", "fsync:1:EINTR", "pwrite:1:short"}) {
    const TemporaryFolder folder;
    const SystemCallFault planted(folder.path(), fault);
    write_reserved(folder / "f", "some text");
    EXPECT_EQ(ReadFile(folder / "f"), "some text") << fault;
    EXPECT_GE(SystemCallFault::calls(fault.substr(0, fault.find(':'))), 2) << fault;
  }
}

TEST(AtomicFile, ThrowsIfAWriteReturnsZeroBytes) {
  const TemporaryFolder folder;
  const SystemCallFault fault(folder.path(), "pwrite:1:zero");
  EXPECT_ERROR(write_reserved(folder / "f", "text"), "cannot write", "Input/output error");
}

TEST(AtomicFile, KeepsTheOldFileIfACallFails) {
  for (const char* fault :
       {"fallocate:1:ENOSPC", "pwrite:1:EDQUOT", "fsync:1:EIO", "rename:1:ENOSPC"}) {
    const TemporaryFolder folder;
    write_reserved(folder / "f", "older");
    const SystemCallFault planted(folder.path(), fault);
    EXPECT_ERROR(write_reserved(folder / "f", "newer"), "check that its folder exists");
    EXPECT_EQ(ReadFile(folder / "f"), "older") << fault;
    EXPECT_EQ(folder.files(), Names{"f"}) << fault;
  }
}

TEST(AtomicFile, HasOldOrNewContentAfterTheWriterIsKilled) {
  const TemporaryFolder folder;
  const int calls = calls_of_one_file(folder.path());
  ASSERT_GT(calls, 5);
  int newer = 0;
  for (int call = 1; call <= calls; ++call) {
    write_reserved(folder / "f", "older");
    const bool survived = testing::survives([&] {
      const SystemCallFault fault(folder.path(), "any:" + std::to_string(call) + ":kill");
      write_reserved(folder / "f", "newer");
    });
    EXPECT_FALSE(survived) << "call " << call << " was not made";
    const std::string text = ReadFile(folder / "f");
    EXPECT_TRUE(text == "older" || text == "newer") << "killed at call " << call << ": " << text;
    newer += text == "newer" ? 1 : 0;
    write_reserved(folder / "f", "last");
    EXPECT_EQ(folder.files(), Names{"f"}) << "after call " << call;
  }
  EXPECT_GT(newer, 0);
  EXPECT_LT(newer, calls);
}

TEST(AtomicFile, KeepsTemporaryFilesOfOtherHosts) {
  const TemporaryFolder folder;
  WriteFile(folder / ".f.tmp-another-host-17-0", "half");
  write_reserved(folder / "f", "text");
  EXPECT_EQ(ReadFile(folder / ".f.tmp-another-host-17-0"), "half");
}

TEST(AtomicFile, PublishNewDoesNotReplaceAnExistingFile) {
  for (const char* fault : {"", "link:1:EPERM"}) {
    const TemporaryFolder folder;
    {
      const SystemCallFault planted(folder.path(), fault);
      EXPECT_TRUE(write_new_file(folder / "f", "first"));
    }
    EXPECT_FALSE(write_new_file(folder / "f", "second"));
    EXPECT_EQ(ReadFile(folder / "f"), "first");
    EXPECT_EQ(folder.files(), Names{"f"});
  }
}

TEST(AtomicFile, DoesNotReplaceAPipe) {
  const TemporaryFolder folder;
  const auto pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_ERROR(write_file(pipe, "text"), "which is a device, a pipe or a socket");
  std::filesystem::create_symlink("pipe", folder / "link");
  EXPECT_ERROR(write_file(folder / "link", "text"), "which is a device, a pipe or a socket");
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
}

TEST(InputFile, IsReadWholeThroughInterruptedAndShortReads) {
  const TemporaryFolder folder;
  WriteFile(folder / "f", "some text");
  for (const char* fault : {"pread:1:EINTR", "pread:1:short"}) {
    const SystemCallFault planted(folder.path(), fault);
    EXPECT_EQ(read_file(folder / "f", "a text", 100), "some text") << fault;
    EXPECT_EQ(SystemCallFault::calls("pread"), 2) << fault;
  }
}

TEST(InputFile, RefusesShrunkenIrregularAndTooLargeFiles) {
  const TemporaryFolder folder;
  WriteFile(folder / "f", "some text");
  const InputFile file(folder / "f", "a text");
  std::filesystem::resize_file(folder / "f", 4);
  std::array<std::byte, 9> bytes{};
  EXPECT_ERROR(file.read_at(0, bytes), "became shorter");
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_ERROR(InputFile(folder / "fifo", "a text"), "fifo' is not a regular file", "a text");
  EXPECT_ERROR(InputFile(folder.path(), "a text"), "is not a regular file");
  EXPECT_ERROR(InputFile(folder / "none", "a text"), "No such file", "a text");
  std::filesystem::resize_file(folder / "f", std::uintmax_t{1} << 40);
  EXPECT_ERROR(read_file(folder / "f", "a text", 1000), "1099511627776 bytes", "1000", "a text");
}

}  // namespace
}  // namespace tessera::files

namespace tessera::detail {
namespace {

std::uint32_t SumOf(const Crc32cWay& way, const std::string& text) {
  return way.sum(std::as_bytes(std::span(text)), 0);
}

TEST(Crc32c, MatchesTheValuesOfTheStandard) {
  std::string rising;
  for (char c = 0; c < 32; ++c) {
    rising.push_back(c);
  }
  for (const Crc32cWay& way : crc32c_ways()) {
    SCOPED_TRACE(way.name);
    EXPECT_EQ(SumOf(way, ""), 0U);
    EXPECT_EQ(SumOf(way, "123456789"), 0xe3069283U);
    // The expected CRC-32C values are from RFC 3720, appendix B.4.
    EXPECT_EQ(SumOf(way, std::string(32, '\0')), 0x8a9136aaU);
    EXPECT_EQ(SumOf(way, std::string(32, '\xff')), 0x62a8ab43U);
    EXPECT_EQ(SumOf(way, rising), 0x46dd794eU);
  }
}

/// Returns the CRC-32C of each prefix of `bytes`, computed bit by bit from the definition.
std::vector<std::uint32_t> SumsByDefinition(std::span<const std::byte> bytes,
                                            std::uint32_t before) {
  std::vector<std::uint32_t> sums{before};
  std::uint32_t crc = ~before;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82f63b78U : 0);
    }
    sums.push_back(~crc);
  }
  return sums;
}

class Crc32cOfText : public ::testing::Test {
 protected:
  Crc32cOfText() {
    for (unsigned i = 0; i < 10'000; ++i) {
      text_.push_back(static_cast<char>(i * i / 7));
    }
  }

  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(text_)); }

 private:
  std::string text_;
};

TEST_F(Crc32cOfText, MatchesTheDefinitionForEverySizeAndAlignment) {
  const auto expected = SumsByDefinition(bytes(), 7);
  for (const Crc32cWay& way : crc32c_ways()) {
    SCOPED_TRACE(way.name);
    for (const std::size_t place : {0, 1, 3, 8, 15, 31, 63}) {
      std::vector<std::byte> memory(place);
      memory.insert(memory.end(), bytes().begin(), bytes().begin() + 4096);
      for (std::size_t size = 0; size <= 4096; ++size) {
        ASSERT_EQ(way.sum(std::span(memory).subspan(place, size), 7), expected[size]) << size;
      }
    }
  }
}

TEST_F(Crc32cOfText, CanBeComputedInTwoParts) {
  const std::uint32_t expected = SumsByDefinition(bytes(), 0).back();
  for (const Crc32cWay& way : crc32c_ways()) {
    SCOPED_TRACE(way.name);
    for (std::size_t i = 0; i < 40; ++i) {
      for (const std::size_t cut : {i, 250 * i}) {
        EXPECT_EQ(way.sum(bytes().subspan(cut), way.sum(bytes().first(cut), 0)), expected) << cut;
      }
    }
  }
}

TEST(Crc32c, UsesTheFastestMethod) {
  EXPECT_EQ(std::string(crc32c_ways().back().name), "table");
  const std::string text(5000, 'x');
  EXPECT_EQ(crc32c(std::as_bytes(std::span(text))), SumOf(crc32c_ways().front(), text));
}

}  // namespace
}  // namespace tessera::detail
