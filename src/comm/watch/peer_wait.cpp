#include "watch/peer_wait.h"

#include <algorithm>
#include <span>
#include <thread>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "watch/group_watch.h"

namespace tessera::comm {
namespace {

std::string collective_error(const GroupInfo& group, const std::string& collective,
                             const std::string& caller, const std::string& reason) {
  return describe(group, collective.c_str()) + ": " +
         (caller.empty() ? "" : caller + " is collective; ") + reason;
}

/// The activity of the first few ranks on other hosts; "" if there are none.
std::string what_others_do(const WorldWatch& world) {
  constexpr std::chrono::milliseconds kAnswerTime{3000};
  constexpr std::size_t kMost = 4;
  if (world.remote() == nullptr) {
    return "";
  }
  std::vector<std::string> lines = world.answers_of_other_hosts(world.remote()->ask(), kAnswerTime);
  std::string text;
  for (const std::string& line : std::span(lines).first(std::min(kMost, lines.size()))) {
    text += (text.empty() ? "" : "; ") + line;
  }
  return text;
}

/// Why the rank of the group that ended first will not arrive; "" if none has ended.
std::string first_ended(const GroupInfo& group) {
  const WorldWatch& world = group.watch->world();
  std::vector<int> peers = group.ranks;
  std::erase(peers, group.world_rank());
  const auto first = world.first_to_end(peers);
  return first ? world.exit_reason(*first) : "";
}

}  // namespace

void fail_without_peers(const GroupInfo& group, const std::string& collective,
                        const std::string& reason) {
  // A dying process closes its sockets a little before its death is visible; from another host this
  // takes about a second.
  const bool near = group.watch->world().remote() == nullptr;
  const std::chrono::milliseconds dying{near ? 300 : 2500};
  constexpr std::chrono::milliseconds kNap{20};
  std::string why = first_ended(group);
  for (auto waited = kNap; why.empty() && waited < dying; waited += kNap) {
    std::this_thread::sleep_for(kNap);
    why = first_ended(group);
  }
  if (why.empty()) {
    const std::string far = what_others_do(group.watch->world());
    why = reason + (far.empty() ? "" : "; on other hosts " + far) +
          "; look for the first error among the other ranks";
  } else {
    why += " (" + reason + ")";
  }
  throw PeerError(collective_error(group, collective, std::string(CallerScope::outermost()), why));
}

PeerWait::PeerWait(const GroupInfo& group, std::string collective)
    : group_(group), collective_(std::move(collective)), caller_(CallerScope::outermost()) {}

void PeerWait::check(const Missing& missing) {
  WorldWatch& world = group_.watch->world();
  if (const auto ended = world.first_to_end(missing())) {
    // The ended rank may have arrived before it ended.
    const std::vector<int> still = missing();
    if (std::ranges::find(still, *ended) != still.end()) {
      fail_because(world.exit_reason(*ended));
    }
  }
  const auto now = Clock::now();
  if (now >= next_look_at_work_) {
    next_look_at_work_ = now + group_.timeout / kLooksAtWork;
    last_work_ = std::max(last_work_, last_work(missing()));
  }
  if (now - begun_ >= group_.timeout &&
      std::chrono::nanoseconds(flight::now() - last_work_) >= group_.timeout) {
    fail_late(missing());
  }
}

std::int64_t PeerWait::last_work(const std::vector<int>& ranks) const {
  const WorldWatch& world = group_.watch->world();
  return std::max(group_.watch->last_work(ranks),
                  world.remote() == nullptr ? 0 : world.remote()->last_work());
}

void PeerWait::fail_because(const std::string& reason) const {
  throw PeerError(collective_error(group_, collective_, caller_, reason));
}

void PeerWait::fail_late(const std::vector<int>& missing) const {
  const WorldWatch& world = group_.watch->world();
  std::string text =
      missing.empty() ? "a peer did not come" : "rank(s) " + join(missing) + " did not arrive";
  text += " within " + std::to_string(group_.timeout.count()) + " ms";
  if (const std::string near = world.what_they_do(missing); !near.empty()) {
    text += ": " + near;
  }
  // The activity of other hosts is added even if ranks of this host are missing, because these may
  // wait for ranks on other hosts.
  const std::string far = what_others_do(world);
  if (!far.empty()) {
    text += "; on other hosts " + far;
  }
  const bool known = !missing.empty() || !far.empty();
  fail_because(text +
               (known ? advice_behind(text) : "; look for the first error among the others"));
}

}  // namespace tessera::comm
