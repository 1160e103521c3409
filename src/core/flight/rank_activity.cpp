// What one rank does, in words.
#include <algorithm>
#include <iterator>

#include "tessera/core/detail/flight_report.h"
#include "tessera/core/error.h"

namespace tessera::flight {
namespace {

/// The rank's activity since its last call, as it recorded it.
std::string since_then(const RankReport& report) {
  for (const Thread& thread : report.threads) {
    if (thread.worked != 0) {
      return thread.work == Work::kReading ? "; since then it has read files"
                                           : "; since then it has written files";
    }
  }
  return "";
}

/// ", after all_reduce (call 7 of group 'dp')".
std::string after_last_call(const RankReport& report) {
  return report.calls.empty() ? ", before its first collective"
                              : ", after " + to_text(report.calls.back()) + since_then(report);
}

std::string goes_on(const RankReport& report) {
  return detail::concat("is slow, but continues: it began ", *report.progress,
                        " collectives a moment ago, the last ", to_text(report.calls.back()));
}

std::string outside_of_collectives(const RankReport& report) {
  switch (report.activity) {
    case Activity::kRuns:
      return "computes outside of collectives (a long computation, or an endless loop)" +
             after_last_call(report);
    case Activity::kSleeps:
      return "sleeps outside of collectives (it waits for a file, a lock or a timer)" +
             after_last_call(report);
    case Activity::kUnknown:
    case Activity::kStopped:
    case Activity::kGone:
      break;
  }
  return "is outside of collectives" + after_last_call(report);
}

/// The call that keeps a rank from its next one in a group; nullptr: none, or unknown, because any
/// of several threads may make the next one.
const Call* what_keeps(const RankReport& report, std::uint64_t group) {
  const Group* theirs = report.find_group(group);
  if (theirs != nullptr && theirs->thread > 0) {
    return report.waiting(theirs->thread);
  }
  return report.threads.size() > 1 ? nullptr : report.waiting();
}

/// Whether the rank calls something else in the place of `call`.
bool calls_another(const RankReport& report, const Call& call) {
  return std::ranges::any_of(report.calls, [&](const Call& each) {
    return each.group == call.group && each.number == call.number &&
           each.collective != call.collective;
  });
}

struct Wait {
  int rank = 0;
  const Call* call = nullptr;
  bool operator==(const Wait&) const = default;
};

/// Follows, from the last wait of `path` on, whom ranks wait for, until a wait is met again.
bool follow(const std::vector<RankReport>& reports, std::vector<Wait>& path, std::int64_t latest) {
  const Wait last = path.back();
  const RankReport* report = find_rank(reports, last.rank);
  if (report == nullptr || last.call == nullptr || last.call->waits_since > latest) {
    return false;
  }
  for (const int rank : missing_ranks(reports, *report, *last.call)) {
    const Wait next{rank, what_keeps(*find_rank(reports, rank), last.call->group)};
    const bool met = std::ranges::find(path, next) != path.end();
    path.push_back(next);
    if (met || follow(reports, path, latest)) {
      return true;
    }
    path.pop_back();
  }
  return false;
}

/// "; another thread waits in ...", for each.
std::string waits_of_other_threads(const RankReport& report, const Call& call) {
  std::string text;
  for (const Thread& thread : report.threads) {
    const Call* other = thread.id == call.thread ? nullptr : report.waiting(thread.id);
    text += other == nullptr ? "" : "; another thread waits in " + to_text(*other);
  }
  return text;
}

bool ended_well(const RankReport& report) {
  return report.state == RankState::kEnded ||
         (report.state == RankState::kExited && report.exit_code == 0);
}

/// "": it has not.
std::string how_it_ended(const RankReport& report) {
  const std::string rank = detail::concat("rank ", report.rank);
  if (ended_well(report)) {
    return rank + " ended " + progress_text(report);
  }
  std::string ended;
  if (report.state == RankState::kGaveUp) {
    ended = rank + " gave up ";
  } else if (report.state == RankState::kExited) {
    ended = detail::concat(rank, " ended with exit code ", report.exit_code, " ");
  } else if (report.activity == Activity::kGone) {
    ended = detail::concat("the process of ", rank, " (pid ", report.pid, ") has ended ");
  }
  return ended.empty() ? "" : ended + progress_text(report) + "; look for its error";
}

}  // namespace

const RankReport* find_rank(const std::vector<RankReport>& reports, int rank) {
  const auto found = std::ranges::find(reports, rank, &RankReport::rank);
  return found == reports.end() ? nullptr : &*found;
}

std::string to_text(const Call& call) {
  const std::string caller = call.caller.empty() ? "" : ", called by " + call.caller;
  if (call.number == 0) {
    return "the set-up of group '" + call.group_name + "'" + caller;
  }
  return detail::concat(call.collective, call.purpose.empty() ? "" : " for ", call.purpose,
                        " (call ", call.number, " of group '", call.group_name, "')", caller);
}

std::string progress_text(const RankReport& report) {
  if (report.step >= 0) {
    return detail::concat("after step ", report.step);
  }
  return report.calls.empty() ? "before its first collective"
                              : "after " + to_text(report.calls.back());
}

std::string why_never(const RankReport& report) {
  const std::string text = how_it_ended(report);
  return ended_well(report) ? text + "; every rank must make this call before World::shutdown()"
                            : text;
}

std::vector<int> missing_ranks(const std::vector<RankReport>& reports, const RankReport& member,
                               const Call& call) {
  const Group* group = member.find_group(call.group);
  std::vector<int> missing;
  for (const RankReport& report : reports) {
    const bool counts =
        group != nullptr && std::ranges::find(group->ranks, report.rank) != group->ranks.end();
    const Group* theirs = report.find_group(call.group);
    if (counts &&
        (theirs == nullptr || theirs->begun <= call.number || calls_another(report, call))) {
      missing.push_back(report.rank);
    }
  }
  return missing;
}

std::string what_it_does(const RankReport& report, const std::vector<RankReport>& reports) {
  const std::string end = how_it_ended(report);
  if (!end.empty()) {
    return end.substr(end.find("rank "));
  }
  const std::string rank = detail::concat("rank ", report.rank, " ");
  const Call* call = report.waiting();
  if (report.activity == Activity::kStopped) {
    // explain_records() takes the pid from a process that is gone.
    const std::string advice =
        report.pid == 0 ? "" : detail::concat("; kill -CONT ", report.pid, " lets it continue");
    return rank + "is stopped (by SIGSTOP, Ctrl-Z or a debugger" + advice + ")" +
           (call == nullptr ? after_last_call(report) : ", in " + to_text(*call));
  }
  // Also where it waits in the last of them.
  if (report.progress.value_or(0) > 0) {
    return rank + goes_on(report);
  }
  if (call == nullptr) {
    return rank + outside_of_collectives(report);
  }
  const std::vector<int> missing = missing_ranks(reports, report, *call);
  return rank + "waits in " + to_text(*call) +
         (missing.empty() ? "" : ", for " + name_ranks(missing)) +
         waits_of_other_threads(report, *call);
}

std::int64_t last_work(const RankReport& report, std::uint64_t group) {
  const Group* own = report.find_group(group);
  std::int64_t last = 0;
  for (const Thread& thread : report.threads) {
    if (own == nullptr || own->thread <= 0 || own->thread == thread.id ||
        thread.id == kSeveralThreads) {
      last = std::max(last, thread.worked);
    }
  }
  return last;
}

std::vector<int> deadlock(const std::vector<RankReport>& reports, int rank, std::int64_t at,
                          std::int64_t least, std::uint64_t group) {
  const RankReport* report = find_rank(reports, rank);
  std::vector<Wait> path;
  if (report != nullptr) {
    const auto call = std::ranges::find_if(report->calls, [&](const Call& each) {
      return each.group == group && each.state == CallState::kWaiting;
    });
    path = {{rank, call == report->calls.end() ? report->waiting() : &*call}};
  }
  std::vector<int> ranks;
  if (report != nullptr && follow(reports, path, at - least)) {
    std::ranges::transform(path, std::back_inserter(ranks), &Wait::rank);
  }
  return ranks;
}

}  // namespace tessera::flight
