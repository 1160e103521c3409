#include "tessera/core/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <span>
#include <string>
#include <vector>

#include "faults/system_calls.h"
#include "testing/errors.h"
#include "testing/files.h"
#include "testing/survives.h"

namespace tessera::files {
namespace {

using testing::ReadFile;
using testing::SystemCallFault;
using testing::TemporaryFolder;
using testing::WriteFile;
using Names = std::vector<std::string>;

/// With room reserved, as files of known size are written.
void write_reserved(const std::filesystem::path& path, const std::string& text) {
  AtomicFile file(path);
  file.reserve(text.size());
  file.write_at(0, std::as_bytes(std::span(text)));
  file.sync();
  file.publish();
}

/// What the calls of write_reserved() are.
int calls_of_one_file(const std::filesystem::path& folder) {
  const SystemCallFault counted(folder, "");
  write_reserved(folder / "f", "older");
  int calls = 0;
  for (const char* call : {"openat", "pwrite", "fsync", "fallocate", "rename", "unlink", "close"}) {
    calls += SystemCallFault::calls(call);
  }
  return calls;
}

TEST(AtomicFile, MakesInterruptedCallsAgain) {
  for (const char* call : {"fallocate", "pwrite", "fsync"}) {
    const TemporaryFolder folder;
    const SystemCallFault fault(folder.path(), std::string(call) + ":1:EINTR");
    write_reserved(folder / "f", "text");
    EXPECT_EQ(ReadFile(folder / "f"), "text") << call;
    EXPECT_GE(SystemCallFault::calls(call), 2) << call;
  }
}

TEST(AtomicFile, ContinuesAfterAShortWrite) {
  const TemporaryFolder folder;
  const SystemCallFault fault(folder.path(), "pwrite:1:short");
  write_reserved(folder / "f", "some text");
  EXPECT_EQ(ReadFile(folder / "f"), "some text");
}

TEST(AtomicFile, RefusesAWriteThatWritesNothing) {
  const TemporaryFolder folder;
  const SystemCallFault fault(folder.path(), "pwrite:1:zero");
  EXPECT_ERROR(write_reserved(folder / "f", "text"), "cannot write", "Input/output error");
}

TEST(AtomicFile, LeavesTheOlderFileWhereACallFails) {
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

TEST(AtomicFile, IsTheOlderOrTheNewerWhereverItsWriterIsKilled) {
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

TEST(AtomicFile, LeavesWhatAWriterOfAnotherHostHasOpen) {
  const TemporaryFolder folder;
  WriteFile(folder / ".f.tmp-another-host-17-0", "half");
  write_reserved(folder / "f", "text");
  EXPECT_EQ(ReadFile(folder / ".f.tmp-another-host-17-0"), "half");
}

TEST(AtomicFile, AnExistingFileIsNotReplacedByANewOne) {
  const TemporaryFolder folder;
  EXPECT_TRUE(write_new_file(folder / "f", "first"));
  EXPECT_FALSE(write_new_file(folder / "f", "second"));
  EXPECT_EQ(ReadFile(folder / "f"), "first");
  EXPECT_EQ(folder.files(), std::vector<std::string>{"f"});
}

TEST(AtomicFile, DoesNotTakeThePlaceOfAPipe) {
  const TemporaryFolder folder;
  const auto pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_ERROR(write_file(pipe, "text"), "which is a device, a pipe or a socket");
  std::filesystem::create_symlink("pipe", folder / "link");
  EXPECT_ERROR(write_file(folder / "link", "text"), "which is a device, a pipe or a socket");
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
}

TEST(AtomicFile, IsNewAlsoWhereTheFileSystemHasNoHardLinks) {
  const TemporaryFolder folder;
  const SystemCallFault fault(folder.path(), "link:1:EPERM");
  EXPECT_TRUE(write_new_file(folder / "f", "text"));
  EXPECT_EQ(ReadFile(folder / "f"), "text");
  EXPECT_EQ(folder.files(), std::vector<std::string>{"f"});
}

}  // namespace
}  // namespace tessera::files
