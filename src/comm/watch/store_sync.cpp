#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "watch/peer_wait.h"
#include "watch/store_sync.h"

namespace tessera::comm {
namespace {

constexpr auto kSetUp = "set-up";

std::string here_key(int rank) {
  return "here/" + std::to_string(rank);
}

/// Keys of a store, each with the rank that sets the key.
using Keys = std::vector<std::pair<std::string, int>>;

constexpr std::chrono::microseconds kFirstNap{200};
constexpr std::chrono::microseconds kLongestNap{100'000};

/// The answer of the store to `question`. Throws PeerError at the time-out if the store does not
/// answer.
template <class Question>
auto answer_of(const detail::StorePtr& store, const GroupInfo& group, Question question) {
  auto answer = ask(store, std::move(question));
  PeerWait wait(group, kSetUp);
  for (auto nap = kFirstNap; !arrives(answer, nap); nap = std::min(2 * nap, kLongestNap)) {
    wait.check([] { return std::vector<int>(); });  // the missing ranks are unknown
  }
  return answer.get();
}

/// The ranks whose keys are not set.
std::vector<int> ranks_without(detail::Store& store, const Keys& keys) {
  std::vector<std::string> names;
  for (const auto& [name, rank] : keys) {
    names.push_back(name);
  }
  std::vector<int> missing;
  if (!store.check(names)) {
    for (const auto& [name, rank] : keys) {
      if (!store.check({name})) {
        missing.push_back(rank);
      }
    }
  }
  return missing;
}

/// Waits until all `keys` are set in the store.
void await_keys(const detail::StorePtr& store, const GroupInfo& group, const Keys& keys) {
  const auto missing = [&] {
    return answer_of(store, group,
                     [keys](detail::Store& asked) { return ranks_without(asked, keys); });
  };
  PeerWait wait(group, kSetUp);
  for (auto nap = kFirstNap; !missing().empty(); nap = std::min(2 * nap, kLongestNap)) {
    wait.check(missing);
    std::this_thread::sleep_for(nap);
  }
}

}  // namespace

void meet(const detail::StorePtr& store, const GroupInfo& group) {
  Keys keys;
  for (const int rank : group.ranks) {
    keys.emplace_back(here_key(rank), rank);
  }
  tell(store, group, here_key(group.world_rank()), "");
  await_keys(store, group, keys);
}

namespace {

constexpr auto kTogether = "together";
constexpr auto kAlone = "alone";
constexpr std::chrono::milliseconds kTogetherWithin{2000};

/// Decides whether all ranks of the world take part in time. The first rank of each group calls
/// this function for its group. The first decision applies to all groups.
std::string decide(detail::Store& store, int group_size, int world_size,
                   const std::string& meeting) {
  constexpr std::chrono::milliseconds kNap{5};
  const std::string decision = meeting + "/decision";
  // A rank takes part in only one such decision at a time, so groups that arrive before the
  // decision are disjoint.
  const bool last = store.add(meeting + "/arrived", group_size) == world_size;
  for (auto waited = std::chrono::milliseconds(0);
       !last && waited < kTogetherWithin && !store.check({decision}); waited += kNap) {
    std::this_thread::sleep_for(kNap);
  }
  return store.compareSet(decision, std::string(), std::string(last ? kTogether : kAlone));
}

}  // namespace

bool all_come_at_once(const detail::StorePtr& world, const detail::StorePtr& own,
                      const GroupInfo& group, int world_size, const std::string& meeting) {
  constexpr auto kAnswer = "answer";
  if (group.rank == 0) {
    tell(own, group, kAnswer,
         answer_of(world, group, [size = group.size(), world_size, meeting](detail::Store& asked) {
           return decide(asked, size, world_size, meeting);
         }));
  }
  return value_from(own, group, 0, kAnswer) == kTogether;
}

std::string value_from(const detail::StorePtr& store, const GroupInfo& group, int from,
                       const std::string& key) {
  await_keys(store, group, {{key, group.ranks[static_cast<std::size_t>(from)]}});
  return answer_of(store, group, [key](detail::Store& asked) { return asked.get_to_str(key); });
}

void tell(const detail::StorePtr& store, const GroupInfo& group, const std::string& key,
          const std::string& value) {
  answer_of(store, group, [key, value](detail::Store& asked) {
    asked.set(key, value);
    return true;
  });
}

}  // namespace tessera::comm
