#pragma once

#include <deque>
#include <string>
#include <string_view>

#include "file_descriptor.h"
#include "output_sink.h"

namespace tessera::run {

/// Passes one output of a rank on, line by line with a prefix, and remembers its last lines.
class LineRelay {
 public:
  LineRelay(FileDescriptor source, std::string prefix, OutputSink& sink);

  bool open() const { return static_cast<bool>(source_); }
  int fd() const { return source_.get(); }
  const OutputSink& sink() const { return *sink_; }
  const std::deque<std::string>& last_lines() const { return last_lines_; }

  /// Reads what is there now; closes at the end of the output.
  void read_available();
  /// Reads what is there, passes an unfinished line on and closes.
  void finish();

 private:
  void take(std::string_view text);
  void end_line();

  FileDescriptor source_;
  std::string prefix_;
  OutputSink* sink_;
  std::string line_;
  std::deque<std::string> last_lines_;
};

}  // namespace tessera::run
