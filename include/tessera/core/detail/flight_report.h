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
  std::uint64_t begun = 0;  ///< how many calls, the set-up included
  std::int64_t thread = 0;  ///< that makes the calls, or kSeveralThreads
};

struct Thread {
  std::int64_t id = 0;
  std::int64_t worked = 0;
  Work work = Work::kNone;
};

/// A record as it was at a moment.
struct RankReport {
  int rank = 0;
  int size = 0;
  std::string host = {};
  std::int64_t pid = 0;
  RankState state = RankState::kRunning;
  int exit_code = 0;
  std::int64_t step = -1;
  std::vector<Thread> threads = {};  ///< that communicate and have not ended
  Activity activity = Activity::kUnknown;
  /// Calls begun between two looks; nullopt: looked at once.
  std::optional<std::uint64_t> progress = {};
  std::uint64_t calls_begun = 0;
  std::vector<Group> groups = {};
  std::vector<Call> calls = {};  ///< the oldest first

  const Group* find_group(std::uint64_t id) const;
  /// The call that the rank, or one thread of it, waits in for the longest time; nullptr: none.
  const Call* waiting(std::int64_t thread = 0) const;
};

/// The report of a rank; nullptr: there is none.
const RankReport* find_rank(const std::vector<RankReport>& reports, int rank);

/// "0-3, 8-14/2": ranks in order, as few characters as that gives.
std::string ranks_text(const std::vector<int>& ranks);
/// The reverse. What does not parse is left out.
std::vector<int> parse_ranks(std::string_view text);

/// Unix time in nanoseconds, as this process read it first; from then on by the steady clock, so
/// that nobody seems to have waited when the system's clock is set.
std::int64_t now();
RankReport read(const Record& record);
/// The reports of the files `world-W.rank-R.flight` of a folder, one vector a world, by rank.
/// Throws Error if there are none.
std::vector<std::vector<RankReport>> read_records(const std::string& folder);
/// How such a file is called.
std::string record_name(int world, int rank);

/// "all_reduce for unit 'a' (call 7 of group 'dp'), called by clip_grad_norm_".
std::string to_text(const Call& call);
/// "after step 20" or, where no step is known, "after all_reduce (call 7 of group 'dp')".
std::string progress_text(const RankReport& report);

/// Why this rank will begin no call any more, and what to do about it; "": it may. "rank 1 gave up
/// after step 20; look for its error".
std::string exit_reason(const RankReport& report);
/// The ranks of the group of `member`'s call that have not begun it, or have begun another
/// collective instead: that will never complete it. A rank without a report is left out.
std::vector<int> missing_ranks(const std::vector<RankReport>& reports, const RankReport& member,
                               const Call& call);
/// What a rank does, without a time: "sleeps outside of collectives, after ...".
std::string what_it_does(const RankReport& report, const std::vector<RankReport>& reports);
/// When a rank last got on with work that its next call in a group waits for; 0: it has said so of
/// none.
std::int64_t last_work(const RankReport& report, std::uint64_t group);
/// A line for each rank, or for all that do the same. `at`: says
/// for how long they have done so at that time; nullopt: since when.
std::vector<std::string> explain(const std::vector<RankReport>& reports,
                                 std::optional<std::int64_t> at = std::nullopt);

}  // namespace tessera::flight
TESSERA_API_END
