#include "watch/meeting.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "watch/ask_in_time.h"
#include "watch/group_watch.h"
#include "watch/peer_wait.h"

namespace tessera::comm {
namespace {

constexpr auto kSetUp = "set-up";

std::string here_key(int rank) {
  return "here/" + std::to_string(rank);
}

/// Keys with the ranks that set them.
using Keys = std::vector<std::pair<std::string, int>>;

/// As ask_in_time().
template <class Ask>
auto ask(detail::Store& store, std::chrono::milliseconds patience, Ask ask) {
  return ask_in_time(detail::StorePtr::unsafe_reclaim_from_nonowning(&store), patience,
                     std::move(ask));
}

/// Waits until all keys are set.
void await_keys(detail::Store& store, const GroupInfo& group, const Keys& keys) {
  constexpr std::chrono::microseconds kFirstNap{200};
  constexpr std::chrono::microseconds kLongestNap{100'000};
  const auto all_set = [keys](detail::Store& asked) {
    std::vector<std::string> names;
    for (const auto& [name, rank] : keys) {
      names.push_back(name);
    }
    return asked.check(names);
  };
  const auto ranks_without = [keys](detail::Store& asked) {
    std::vector<int> missing;
    for (const auto& [name, rank] : keys) {
      if (!asked.check({name})) {
        missing.push_back(rank);
      }
    }
    return missing;
  };
  const auto missing = [&] {
    // A silent store is rank 0's, if that is stopped.
    return ask(store, kStorePatience, ranks_without)
        .value_or(group.watch->world().is_stopped(0) ? std::vector<int>{0} : std::vector<int>());
  };
  PeerWait wait(group, kSetUp);
  for (auto nap = kFirstNap; !ask(store, kStorePatience, all_set).value_or(false);
       nap = std::min(2 * nap, kLongestNap)) {
    wait.check(missing);
    std::this_thread::sleep_for(nap);
  }
}

}  // namespace

void meet(detail::Store& store, const GroupInfo& group) {
  Keys keys;
  for (const int rank : group.ranks) {
    keys.emplace_back(here_key(rank), rank);
  }
  store.set(here_key(group.world_rank()), "");
  await_keys(store, group, keys);
}

namespace {

constexpr auto kTogether = "together";
constexpr auto kAlone = "alone";
constexpr std::chrono::milliseconds kTogetherWithin{2000};

/// The first of a group's ranks acts for the group. The first decision holds for all groups.
std::string decide(detail::Store& store, int group_size, int world_size,
                   const std::string& meeting) {
  constexpr std::chrono::milliseconds kNap{5};
  const std::string decision = meeting + "/decision";
  // A rank is in one such call at a time: groups that come before the decision are disjoint.
  const bool last = store.add(meeting + "/arrived", group_size) == world_size;
  for (auto waited = std::chrono::milliseconds(0);
       !last && waited < kTogetherWithin && !store.check({decision}); waited += kNap) {
    std::this_thread::sleep_for(kNap);
  }
  return store.compareSet(decision, std::string(), std::string(last ? kTogether : kAlone));
}

}  // namespace

bool all_come_at_once(detail::Store& world, detail::Store& own, const GroupInfo& group,
                      int world_size, const std::string& meeting) {
  constexpr auto kAnswer = "answer";
  if (group.rank == 0) {
    const auto answer = ask(world, kTogetherWithin + kStorePatience,
                            [size = group.size(), world_size, meeting](detail::Store& asked) {
                              return decide(asked, size, world_size, meeting);
                            });
    own.set(kAnswer, answer.value_or(kAlone));
  }
  return value_from(own, group, 0, kAnswer) == kTogether;
}

std::string value_from(detail::Store& store, const GroupInfo& group, int from,
                       const std::string& key) {
  await_keys(store, group, {{key, group.ranks[static_cast<std::size_t>(from)]}});
  return store.get_to_str(key);
}

}  // namespace tessera::comm
