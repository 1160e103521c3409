#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/core/detail/flight_record.h"
#include "tessera/core/flight.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::flight {

// Evaluates the flight records of a job's ranks. Pure, except now() and read_records().

struct Call {
  std::uint64_t order = 0;
  std::uint64_t group = 0;
  std::uint64_t number = 0;
  std::int64_t thread = 0;
  std::int64_t bytes = 0;
  std::int64_t step = -1;
  std::string group_name;
  std::string collective;
  std::string purpose = {};  ///< "unit 'layers.3'"
  std::string caller = {};   ///< the function that the program called
  CallState state = CallState::kBegun;
  std::int64_t begun = 0;
  std::int64_t waits_since = 0;
  std::int64_t ended = 0;
};

struct Group {
  std::uint64_t id = 0;
  std::string name;
  std::vector<int> ranks;
  std::uint64_t begun = 0;  ///< number of calls begun, including the set-up
  std::int64_t thread = 0;  ///< the thread that makes the calls, or kSeveralThreads
};

struct Thread {
  std::int64_t id = 0;
  std::int64_t worked = 0;
  Work work = Work::kNone;
};

/// A snapshot of a record.
struct RankReport {
  int rank = 0;
  int size = 0;
  std::string host = {};
  std::int64_t pid = 0;
  RankState state = RankState::kRunning;
  int exit_code = 0;
  std::int64_t step = -1;
  std::vector<Thread> threads = {};  ///< threads that communicate and have not ended
  Activity activity = Activity::kUnknown;
  /// Number of calls begun between two readings; nullopt if the record was read once.
  std::optional<std::uint64_t> progress = {};
  std::uint64_t calls_begun = 0;
  std::vector<Group> groups = {};
  std::vector<Call> calls = {};  ///< the oldest first

  const Group* find_group(std::uint64_t id) const;
  /// The call in which the rank, or its thread `thread`, has been waiting longest; nullptr if it is
  /// not waiting.
  const Call* waiting(std::int64_t thread = 0) const;
};

/// The report of a rank; nullptr if there is none.
const RankReport* find_rank(const std::vector<RankReport>& reports, int rank);

/// Ranks as short text, in order: "0-3, 8-14/2".
std::string ranks_text(const std::vector<int>& ranks);
/// The inverse of ranks_text. Parts that cannot be parsed are ignored.
std::vector<int> parse_ranks(std::string_view text);

/// Unix time in nanoseconds. The system's clock is read once in a process; after that the steady
/// clock is used, so that setting the system's clock does not look like a wait.
std::int64_t now();
RankReport read(const Record& record);
/// The reports from the files `world-W.rank-R.flight` in a folder: one vector for each world,
/// ordered by rank. Throws Error if there are no such files.
std::vector<std::vector<RankReport>> read_records(const std::string& folder);
/// The file name of a rank's record.
std::string record_name(int world, int rank);

/// A call as text: "all_reduce for unit 'a' (call 7 of group 'dp'), called by clip_grad_norm_".
std::string to_text(const Call& call);
/// A rank's progress: "after step 20" or, if no step is known, "after all_reduce (call 7 of group
/// 'dp')".
std::string progress_text(const RankReport& report);

/// Why this rank will begin no more calls, and what to do about it: "rank 1 gave up after step 20;
/// look for its error". "" if it may begin more calls.
std::string exit_reason(const RankReport& report);
/// The ranks in the group of `member`'s call that have not begun the call, or have begun another
/// collective instead and so will never complete it. Ranks without a report are left out.
std::vector<int> missing_ranks(const std::vector<RankReport>& reports, const RankReport& member,
                               const Call& call);
/// The activity of a rank, without a time: "sleeps outside of collectives, after ...".
std::string what_it_does(const RankReport& report, const std::vector<RankReport>& reports);
/// When a rank last made progress with work (on files) that its next call in a group waits for; 0
/// if it has reported none.
std::int64_t last_work(const RankReport& report, std::uint64_t group);
/// A line for each rank, or for all ranks with the same activity. `at`: the time until which
/// durations are counted; nullopt: lines say since when instead.
std::vector<std::string> explain(const std::vector<RankReport>& reports,
                                 std::optional<std::int64_t> at = std::nullopt);

}  // namespace tessera::flight
TESSERA_API_END
