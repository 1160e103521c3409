// Describes the activity of a job's ranks in words, from their flight records.

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/detail/flight_report.h"
#include "tessera/core/error.h"
#include "tessera/core/flight.h"

namespace tessera::flight {
namespace {

/// The rank's recorded activity since its last call.
std::string since_then(const RankReport& report) {
  for (const Thread& thread : report.threads) {
    if (thread.worked != 0) {
      return thread.work == Work::kReading ? "; since then it has read files"
                                           : "; since then it has written files";
    }
  }
  return "";
}

/// The rank's last call as text: ", after all_reduce (call 7 of group 'dp')".
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

/// Whether the rank has made a different call at the position of `call`.
bool calls_another(const RankReport& report, const Call& call) {
  return std::ranges::any_of(report.calls, [&](const Call& each) {
    return each.group == call.group && each.number == call.number &&
           each.collective != call.collective;
  });
}

bool ended_well(const RankReport& report) {
  return report.state == RankState::kEnded ||
         (report.state == RankState::kExited && report.exit_code == 0);
}

/// How the rank ended; "" if it has not.
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

std::string exit_reason(const RankReport& report) {
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
    const bool exists = ::kill(static_cast<pid_t>(report.pid), 0) == 0;
    return rank + "is stopped (by SIGSTOP, Ctrl-Z or a debugger" +
           (exists ? "; kill -CONT " + std::to_string(report.pid) + " lets it continue" : "") +
           ")" + (call == nullptr ? after_last_call(report) : ", in " + to_text(*call));
  }
  // The rank makes progress, even if it waits in its last call.
  if (report.progress.value_or(0) > 0) {
    return rank + goes_on(report);
  }
  if (call == nullptr) {
    return rank + outside_of_collectives(report);
  }
  const std::vector<int> missing = missing_ranks(reports, report, *call);
  return rank + "waits in " + to_text(*call) +
         (missing.empty() ? "" : ", for " + name_ranks(missing));
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

namespace {

/// A duration as text: ", for 12.0 s" until the time `at`, or ", since 17:21:13" without one.
std::string duration_text(std::int64_t since, std::optional<std::int64_t> at) {
  constexpr std::int64_t kNanosecondsPerSecond = 1'000'000'000;
  std::array<char, 32> text{};
  if (since == 0) {
    return "";
  }
  if (at) {
    std::snprintf(text.data(), text.size(), ", for %.1f s",
                  static_cast<double>(*at - since) / kNanosecondsPerSecond);
  } else {
    const std::time_t seconds = since / kNanosecondsPerSecond;
    std::tm local{};
    std::strftime(text.data(), text.size(), ", since %H:%M:%S", localtime_r(&seconds, &local));
  }
  return text.data();
}

/// Since when the rank has had its current activity.
std::int64_t since(const RankReport& report) {
  if (const Call* call = report.waiting()) {
    return call->waits_since;
  }
  if (report.calls.empty()) {
    return 0;
  }
  const Call& last = report.calls.back();
  return std::max(last.begun, last.ended);
}

/// The text without the rank's number ("rank 7 waits"), so that ranks with the same activity have
/// the same text.
std::string without_rank(const std::string& text) {
  const std::size_t number = text.find(' ') + 1;
  return text.substr(std::min(text.find(' ', number), text.size()));
}

}  // namespace

std::vector<std::string> explain(const std::vector<RankReport>& reports,
                                 std::optional<std::int64_t> at) {
  struct Doing {
    std::vector<int> ranks;
    std::int64_t since = 0;
  };
  std::vector<std::pair<std::string, Doing>> doings;
  for (const RankReport& report : reports) {
    const std::string text = without_rank(what_it_does(report, reports));
    auto found = std::ranges::find(doings, text, &std::pair<std::string, Doing>::first);
    if (found == doings.end()) {
      found = doings.insert(found, {text, {{}, since(report)}});
    }
    found->second.ranks.push_back(report.rank);
    found->second.since = std::min(found->second.since, since(report));
  }
  std::vector<std::string> lines;
  for (const auto& [text, doing] : doings) {
    lines.push_back((doing.ranks.size() == 1 ? "" : "each of ") + name_ranks(doing.ranks) + text +
                    duration_text(doing.since, at));
  }
  return lines;
}

namespace {

/// The ranks of the job without a record here, such as the ranks of other nodes.
std::vector<int> ranks_without_record(const std::vector<RankReport>& reports) {
  std::vector<int> ranks;
  for (int rank = 0; rank < reports.front().size; ++rank) {
    if (find_rank(reports, rank) == nullptr) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

void explain_world(const std::vector<RankReport>& reports, const std::string& name,
                   std::vector<std::string>& lines) {
  lines.push_back(name + "records of " + std::to_string(reports.size()) + " of " +
                  std::to_string(reports.front().size) + " ranks");
  for (const std::string& line : explain(reports)) {
    lines.push_back("  " + line);
  }
  if (const auto missing = ranks_without_record(reports); !missing.empty()) {
    lines.push_back("  no record here of " + name_ranks(missing) +
                    ": copy those of all nodes into one folder");
  }
}

}  // namespace

std::vector<std::string> explain_records(const std::string& folder) {
  std::vector<std::string> lines;
  const auto worlds = read_records(folder);
  for (std::size_t world = 0; world < worlds.size(); ++world) {
    explain_world(worlds[world], worlds.size() == 1 ? "" : "world " + std::to_string(world) + ", ",
                  lines);
  }
  return lines;
}

}  // namespace tessera::flight
