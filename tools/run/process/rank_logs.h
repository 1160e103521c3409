// The files that --log-dir, --tee and --redirects ask for, laid out as torchrun does:
// DIR/ID_XXXXXX/attempt_N/LOCAL_RANK/stdout.log and stderr.log.

#pragma once

#include <optional>
#include <string>

#include "../options.h"
#include "file_descriptor.h"
#include "rank_output.h"

namespace tessera::run {

/// A file of one output of a rank.
class RankLog {
 public:
  explicit RankLog(const std::string& path);

  void add(const std::string& line) { sink_.add(line + "\n"); }
  OutputSink& sink() { return sink_; }
  /// "": it holds all that the rank wrote; else what it lacks, and why.
  std::string loss() const;

 private:
  std::string path_;
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
