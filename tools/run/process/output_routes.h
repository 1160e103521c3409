// Which way the lines of each rank go: to the launcher's own outputs, to files, or both.

#pragma once

#include <deque>
#include <string>
#include <vector>

#include "rank_logs.h"
#include "rank_output.h"

namespace tessera::run {

class OutputRoutes {
 public:
  /// `start`: how often the job was started before. `out`, `errors`: where what is shown goes.
  OutputRoutes(const Options& options, const LogFolder& logs, int start, OutputSink& out,
               LineMerger& errors);

  /// Whether the rank writes to the launcher's standard output itself: rank 0, with its progress
  /// line and without a relay between, where all that it writes is shown and nothing else.
  bool has_own_stdout(int local_rank) const;
  LineRelay::TakeLine out(int local_rank);
  LineRelay::TakeLine err(int local_rank);
  /// The sinks that are files.
  std::vector<OutputSink*> sinks();
  /// What the files lack, each in a sentence.
  std::vector<std::string> losses() const;

 private:
  bool shows_out(int local_rank) const;
  bool shows_err(int local_rank) const;
  bool is_shown(int local_rank) const;
  LineRelay::TakeLine join(std::optional<RankLog> log, LineRelay::TakeLine show);

  const LogOptions* options_;
  const LogFolder* logs_;
  int start_;
  int first_rank_;
  OutputSink* out_;
  LineMerger* errors_;
  std::deque<RankLog> files_;  // the routes point to them
};

}  // namespace tessera::run
