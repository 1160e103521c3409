#include "tessera/observe/detail/progress.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "testing/files.h"

namespace tessera::observe {
namespace {

/// A pseudo-terminal: what is written to stream() can be read by the test.
class Terminal {
 public:
  Terminal() {
    winsize size{.ws_row = 24, .ws_col = 200, .ws_xpixel = 0, .ws_ypixel = 0};
    if (openpty(&reader_, &writer_, nullptr, nullptr, &size) != 0) {
      throw std::runtime_error("pty");
    }
    stream_ = fdopen(writer_, "w");
  }
  ~Terminal() {
    std::fclose(stream_);
    close(reader_);
  }
  std::FILE* stream() { return stream_; }
  std::string shown() {
    std::fprintf(stream_, "|");
    std::fflush(stream_);
    std::string text;
    for (char c = 0; read(reader_, &c, 1) == 1 && c != '|';) {
      text.push_back(c);
    }
    return text;
  }

 private:
  int reader_ = -1, writer_ = -1;
  std::FILE* stream_ = nullptr;
};

TEST(ProgressText, SaysHowFarAndHowLongAndFitsTheTerminal) {
  EXPECT_EQ(progress_text(120, 2000, 2.34567, 12345.6, 200, 200),
            "step 120/2000 [=>                  ]   6%  loss 2.3457  12,346 tokens/s  ETA 3m20s");
  EXPECT_EQ(progress_text(1, 2, 1, 1, -1, 200),
            "step 1/2 [==========>         ]  50%  loss 1.0000  1 tokens/s  ETA --");
  EXPECT_EQ(progress_text(1, 2, 1, 1, -1, 10), "step 1/2 [");
}

TEST(Progress, IsSilentWhereThereIsNoTerminal) {
  testing::TemporaryFolder folder;
  std::FILE* file = std::fopen((folder / "out").c_str(), "w");
  {
    Progress progress(10, file, file);
    progress.update(1, 2.0, 3.0);
    progress.line("step: 1");
    progress.update(2, 2.0, 3.0);
  }
  std::fclose(file);
  EXPECT_EQ(testing::ReadFile(folder / "out"), "step: 1\n");
}

TEST(Progress, DrawsOnATerminalAndKeepsLogLinesApart) {
  Terminal terminal;
  Progress progress(2, terminal.stream(), terminal.stream());
  progress.update(1, 2.0, 3.0);
  EXPECT_TRUE(terminal.shown().starts_with("\r\x1b[Kstep 1/2"));
  progress.line("a line");
  EXPECT_EQ(terminal.shown(), "\r\x1b[Ka line\r\n");
  progress.update(1, 2.0, 3.0);
  terminal.shown();
  progress.update(2, 2.0, 3.0);
  EXPECT_EQ(terminal.shown(), "\r\x1b[K");
}

}  // namespace
}  // namespace tessera::observe
