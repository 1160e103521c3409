#include "watch/meeting.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "watch/peer_wait.h"

namespace tessera::comm {
namespace {

constexpr auto kSetUp = "set-up";

std::string here_key(int rank) {
  return "here/" + std::to_string(rank);
}

/// Waits until all keys are set; `missing` returns the ranks whose keys are not.
void await_keys(detail::Store& store, const GroupInfo& group, const std::vector<std::string>& keys,
                const PeerWait::Missing& missing) {
  constexpr std::chrono::microseconds kFirstNap{200};
  constexpr std::chrono::microseconds kLongestNap{100'000};
  PeerWait wait(group, kSetUp);
  for (auto nap = kFirstNap; !store.check(keys); nap = std::min(2 * nap, kLongestNap)) {
    wait.check(missing);
    std::this_thread::sleep_for(nap);
  }
}

}  // namespace

void meet(detail::Store& store, const GroupInfo& group) {
  std::vector<std::string> keys;
  for (const int rank : group.ranks) {
    keys.push_back(here_key(rank));
  }
  store.set(here_key(group.world_rank()), "");
  await_keys(store, group, keys, [&] {
    std::vector<int> missing;
    for (const int rank : group.ranks) {
      if (!store.check({here_key(rank)})) {
        missing.push_back(rank);
      }
    }
    return missing;
  });
}

namespace {

constexpr auto kTogether = "together";
constexpr auto kAlone = "alone";

/// The first of a group's ranks acts for the group. The first decision holds for all groups.
std::string decide(detail::Store& store, const GroupInfo& group, int world_size,
                   const std::string& meeting) {
  constexpr std::chrono::milliseconds kPatience{2000};
  constexpr std::chrono::milliseconds kNap{5};
  const std::string decision = meeting + "/decision";
  // A rank is in one such call at a time: groups that come before the decision are disjoint.
  const bool last = store.add(meeting + "/arrived", group.size()) == world_size;
  for (auto waited = std::chrono::milliseconds(0);
       !last && waited < kPatience && !store.check({decision}); waited += kNap) {
    std::this_thread::sleep_for(kNap);
  }
  return store.compareSet(decision, std::string(), std::string(last ? kTogether : kAlone));
}

}  // namespace

bool all_come_at_once(detail::Store& world, detail::Store& own, const GroupInfo& group,
                      int world_size, const std::string& meeting) {
  constexpr auto kAnswer = "answer";
  if (group.rank == 0) {
    own.set(kAnswer, decide(world, group, world_size, meeting));
  }
  return value_from(own, group, 0, kAnswer) == kTogether;
}

std::string value_from(detail::Store& store, const GroupInfo& group, int from,
                       const std::string& key) {
  await_keys(store, group, {key}, [&] {
    const int rank = group.ranks[static_cast<std::size_t>(from)];
    return store.check({key}) ? std::vector<int>() : std::vector<int>{rank};
  });
  return store.get_to_str(key);
}

}  // namespace tessera::comm
