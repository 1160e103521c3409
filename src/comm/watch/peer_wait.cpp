#include "watch/peer_wait.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/core/flight.h"
#include "watch/group_watch.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// The beginning of a message about a call: the collective, and the function that the program
/// called.
std::string beginning(const GroupInfo& group, const std::string& collective) {
  const std::string_view caller = CallerScope::outermost();
  return describe(group, collective.c_str()) + ": " +
         (caller.empty() ? "" : detail::concat(caller, " is collective; "));
}

}  // namespace

void fail_without_peers(const GroupInfo& group, const std::string& collective,
                        const std::string& reason) {
  const WorldWatch& world = group.watch->world();
  // A dying process closes its sockets a little before other ranks can see that the process has
  // ended. On another host, seeing this takes about a second.
  const milliseconds dying{world.has_remote() ? 2500 : 300};
  constexpr milliseconds kNap{20};
  std::vector<int> peers = group.ranks;
  std::erase(peers, group.world_rank());
  auto ended = world.first_to_end(peers);
  for (auto waited = kNap; !ended && waited < dying; waited += kNap) {
    world.look();
    std::this_thread::sleep_for(kNap);
    ended = world.first_to_end(peers);
  }
  if (ended) {
    world.announce_end(*ended);  // a killed rank has not announced its end
  }
  const std::vector<int> away = world.away(*group.watch->group());
  throw PeerError(
      beginning(group, collective) +
      (ended ? world.exit_reason(*ended) + " (" + reason + ")"
             : reason + "; look for the first error among the other ranks" +
                   (away.empty() ? "" : " (on other hosts: " + flight::name_ranks(away) + ")")));
}

PeerWait::PeerWait(const GroupInfo& group, std::string collective,
                   std::optional<std::uint64_t> number)
    : PeerWait(group.watch->world(), group.watch->group(), number.value_or(group.watch->number()),
               group.timeout, [&group, collective = std::move(collective)] {
                 return beginning(group, collective);
               }) {}

PeerWait::PeerWait(WorldWatch& world, std::shared_ptr<const WatchedGroup> group,
                   std::uint64_t number, milliseconds timeout, std::function<std::string()> call)
    : world_(world),
      group_(std::move(group)),
      number_(number),
      timeout_(timeout),
      call_(std::move(call)) {}

void PeerWait::check(const Missing& missing) {
  std::string why = why_lost(missing);
  why = why.empty() ? why_late(missing) : why;
  if (!why.empty()) {
    throw PeerError(call_() + why);
  }
}

std::string PeerWait::why_lost(const Missing& missing) const {
  world_.look();
  if (const auto ended = world_.first_to_end(missing())) {
    // The rank that ended may have arrived before its end.
    const std::vector<int> still = missing();
    if (std::ranges::find(still, *ended) != still.end()) {
      world_.announce_end(*ended);  // a killed rank has not announced its end
      return world_.exit_reason(*ended);
    }
  }
  return "";
}

std::string PeerWait::why_late(const Missing& missing) {
  constexpr milliseconds kLongWait{1000};
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - begun_);
  const milliseconds limit = world_.settings().limit;
  if (waited >= std::min(kLongWait, timeout_ / 2) && !std::exchange(announced_, true)) {
    world_.announce_wait(*group_, number_);
  }
  if (waited >= timeout_) {
    return describe_missing(missing(), detail::concat("within ", timeout_.count(), " ms"));
  }
  if (limit.count() > 0 && waited >= limit && !std::exchange(reported_, true)) {
    constexpr double kMillisecondsPerSecond = 1000;
    const std::string duration =
        detail::concat("for ", static_cast<double>(waited.count()) / kMillisecondsPerSecond, " s");
    // The line is written in one call, because several ranks write to the same terminal.
    std::fputs(
        ("tessera watchdog: " + call_() + describe_missing(missing(), duration) + "\n").c_str(),
        stderr);
  }
  return "";
}

std::string PeerWait::describe_missing(std::vector<int> missing, const std::string& time) const {
  const auto late = world_.not_waiting(*group_, number_);
  const std::vector<int> away = world_.away(*group_);
  std::ranges::copy(late.value_or(missing.empty() ? away : std::vector<int>()),
                    std::back_inserter(missing));
  // Ranks on other hosts that have ended are in both lists.
  const std::set<int> unique(missing.begin(), missing.end());
  missing.assign(unique.begin(), unique.end());
  std::string doings = world_.what_they_do(missing.empty() ? group_->ranks : missing);
  if (!late) {
    doings += (doings.empty() ? "" : "; ") + detail::concat("the job's store does not answer, so ",
                                                            flight::name_ranks(away),
                                                            " may be out of reach");
  }
  return (missing.empty() ? "no rank is known to be missing, but the call did not end " + time
                          : "rank(s) " + join(missing) + " did not arrive " + time) +
         (doings.empty() ? "" : ": " + doings) +
         (missing.empty() ? "; look at the network, and at what NCCL_DEBUG=INFO shows" : "");
}

}  // namespace tessera::comm
