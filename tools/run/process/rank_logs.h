// The files that --log-dir, --tee and --redirects ask for, laid out as torchrun does:
// DIR/ID_XXXXXX/attempt_N/LOCAL_RANK/stdout.log and stderr.log.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "../options.h"
#include "file_descriptor.h"
#include "rank_output.h"

namespace tessera::run {

/// A file of one output of a rank, and older ones of it: stdout.log.1 is the last that was full.
class RankLog {
 public:
  /// `most`: bytes of a file; 0: there is one alone.
  RankLog(const std::string& path, std::int64_t most);

  void add(const std::string& line);
  OutputSink& sink() { return sink_; }
  /// "": it holds all that the rank wrote; else what it lacks, and why.
  std::string loss() const;

 private:
  void begin_next_file();

  std::string path_;
  std::int64_t most_;
  std::int64_t bytes_ = 0;
  FileDescriptor file_;
  OutputSink sink_;
};

/// The folder of a job's logs; nothing is made where no output is to be written.
class LogFolder {
 public:
  /// Throws Error if it cannot be made.
  explicit LogFolder(const Options& options);

  /// "": there are no logs.
  const std::string& path() const { return path_; }
  /// The log of a local rank in a start of the job, both from 0; nullopt: it is not written.
  std::optional<RankLog> out(int start, int local_rank) const;
  std::optional<RankLog> err(int start, int local_rank) const;

 private:
  std::string file(int start, int local_rank, const char* name) const;

  LogOptions options_;
  std::string path_;
};

}  // namespace tessera::run
