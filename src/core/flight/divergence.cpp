// Finds the rank that left the common order of calls, and describes it.
#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <map>
#include <set>

#include "tessera/core/detail/flight_report.h"
#include "tessera/core/error.h"

namespace tessera::flight {
namespace {

using Calls = std::vector<const Call*>;
using Place = std::pair<std::uint64_t, std::uint64_t>;  ///< group and number

/// More ranks than this are not compared with all others, only with so many of them.
constexpr std::size_t kWitnesses = 16;

Place place_of(const Call& call) {
  return {call.group, call.number};
}

/// Calls that a rank makes in one order, by the group that identifies the order.
using Strands = std::map<std::uint64_t, Calls>;

std::set<std::uint64_t> groups_of_several_threads(const RankReport& report) {
  std::set<std::uint64_t> ids;
  for (const Group& group : report.groups) {
    if (group.thread == kSeveralThreads) {
      ids.insert(group.id);
    }
  }
  return ids;
}

/// The calls of `report` in groups that `other` is a member of too: those of a thread are in one
/// order, known by the first group of it. Those of a group that threads share are by themselves.
Strands calls_in_common_groups(const RankReport& report, const RankReport& other,
                               const std::set<std::uint64_t>& shared) {
  std::map<std::uint64_t, std::uint64_t> strand_of;
  std::map<std::int64_t, std::uint64_t> first_of_thread;
  for (const Group& group : report.groups) {
    if (std::ranges::find(group.ranks, other.rank) == group.ranks.end()) {
      continue;
    }
    strand_of[group.id] = shared.contains(group.id)
                              ? group.id
                              : first_of_thread.emplace(group.thread, group.id).first->second;
  }
  Strands strands;
  for (const Call& call : report.calls) {
    if (const auto strand = strand_of.find(call.group); strand != strand_of.end()) {
      strands[strand->second].push_back(&call);
    }
  }
  return strands;
}

/// Drops the beginning that the other's record has already forgotten.
void drop_forgotten(Calls& calls, const Calls& others) {
  std::set<Place> known;
  for (const Call* call : others) {
    known.insert(place_of(*call));
  }
  const auto first = std::ranges::find_if(
      calls, [&](const Call* call) { return known.contains(place_of(*call)); });
  if (first != calls.end()) {
    calls.erase(calls.begin(), first);
  }
}

bool forgets(const RankReport& report) {
  return !report.calls.empty() && report.calls.front().order > 1;
}

bool same(const Call& a, const Call& b) {
  return place_of(a) == place_of(b) && a.collective == b.collective && a.purpose == b.purpose;
}

/// Where two ranks part: the last call in common, and what each calls instead of the other's.
struct Divergence {
  const Call* last = nullptr;   ///< nullptr: there was none
  const Call* here = nullptr;   ///< nullptr: nothing more
  const Call* there = nullptr;  ///< likewise
};

Divergence divergence_of(Calls here, Calls there, bool forgotten) {
  if (forgotten) {
    drop_forgotten(here, there);
    drop_forgotten(there, here);
  }
  Divergence divergence;
  std::size_t i = 0;
  while (i < here.size() && i < there.size() && same(*here[i], *there[i])) {
    divergence.last = here[i++];
  }
  divergence.here = i < here.size() ? here[i] : nullptr;
  divergence.there = i < there.size() ? there[i] : nullptr;
  return divergence;
}

/// Where two ranks part, by calls in the groups that both are members of: the first place where
/// both call something different, or else one where only the other has continued.
Divergence divergence_of(const RankReport& here, const RankReport& there) {
  std::set<std::uint64_t> shared = groups_of_several_threads(here);
  shared.merge(groups_of_several_threads(there));
  const Strands own = calls_in_common_groups(here, there, shared);
  Strands others = calls_in_common_groups(there, here, shared);
  for (const auto& [strand, calls] : own) {
    others.emplace(strand, Calls{});
  }
  Divergence found;
  for (auto& [strand, calls] : others) {
    const auto same_strand = own.find(strand);
    Divergence divergence = divergence_of(same_strand == own.end() ? Calls{} : same_strand->second,
                                          calls, forgets(here) || forgets(there));
    if (divergence.here != nullptr && divergence.there != nullptr) {
      return divergence;
    }
    found = divergence.there != nullptr ? divergence : found;
  }
  return found;
}

/// Where one rank parts from the others, by their ranks.
struct Divergences {
  std::map<int, Divergence> parted;  ///< each calls something else
  std::size_t behind = 0;            ///< ranks that have gone on in a group of both
};

Divergences divergences_of(const RankReport& report, const std::vector<RankReport>& reports) {
  Divergences divergences;
  const std::size_t stride = std::max<std::size_t>(1, reports.size() / kWitnesses);
  for (std::size_t i = 0; i < reports.size(); i += stride) {
    const Divergence divergence = divergence_of(report, reports[i]);
    if (divergence.here != nullptr && divergence.there != nullptr) {
      divergences.parted[reports[i].rank] = divergence;
    } else if (divergence.there != nullptr) {
      ++divergences.behind;
    }
  }
  return divergences;
}

/// "; ranks 0, 2 call barrier (call 7 of group 'dp')", for each thing that others call instead.
std::string what_others_call(const std::map<int, Divergence>& divergences) {
  std::map<std::string, std::vector<int>> ranks;
  for (const auto& [rank, divergence] : divergences) {
    ranks[to_text(*divergence.there)].push_back(rank);
  }
  std::string text;
  for (const auto& [call, of] : ranks) {
    text += "; " + name_ranks(of) + (of.size() == 1 ? " calls " : " call ") + call;
  }
  return text;
}

/// ", for 12.0 s" at a time, ", since 17:21:13" without one.
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

/// Since when a rank does what it does.
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

/// The same text for all ranks that do the same: its own number is taken out of "rank 7 waits".
std::string without_rank(const std::string& text) {
  const std::size_t number = text.find(' ') + 1;
  return text.substr(std::min(text.find(' ', number), text.size()));
}

}  // namespace

std::string first_divergence(const std::vector<RankReport>& reports) {
  // The one that goes other ways than most: the others part from it alone.
  const RankReport* departed = nullptr;
  std::map<int, Divergence> divergences;
  std::size_t most = 0;
  bool alone = false;
  for (const RankReport& report : reports) {
    Divergences found = divergences_of(report, reports);
    const std::size_t others = found.parted.empty() ? 0 : found.parted.size() + found.behind;
    alone = others > most || (alone && others < most);
    if (others > most) {
      departed = &report;
      divergences = std::move(found.parted);
      most = others;
    }
  }
  if (departed == nullptr) {
    return "";
  }
  const Divergence& divergence = divergences.begin()->second;
  const std::string where =
      divergence.last == nullptr ? "from the beginning" : "after " + to_text(*divergence.last);
  const std::string who = detail::concat("rank ", departed->rank);
  return (alone ? who + " left the common order first, " + where + ": it calls "
                : "the ranks part " + where + ": " + who + " calls ") +
         to_text(*divergence.here) + what_others_call(divergences);
}

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
  if (const std::string left = first_divergence(reports); !left.empty()) {
    lines.push_back(left);
  }
  for (const auto& [text, doing] : doings) {
    lines.push_back((doing.ranks.size() == 1 ? "" : "each of ") + name_ranks(doing.ranks) + text +
                    duration_text(doing.since, at));
  }
  return lines;
}

}  // namespace tessera::flight
