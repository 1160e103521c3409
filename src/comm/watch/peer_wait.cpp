#include "watch/peer_wait.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <set>
#include <utility>

#include "host/host.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/detail/flight_record.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// The beginning of an error message: the collective, and the function that the program called.
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
  // ended. Ranks on another machine see this about a second later.
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
    world.announce_end(*ended);  // a killed rank cannot announce its end
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
    // missing() is called again: the rank may have taken part in the collective before it ended.
    const std::vector<int> still = missing();
    if (std::ranges::find(still, *ended) != still.end()) {
      world_.announce_end(*ended);  // a killed rank cannot announce its end
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
    // The line is written by one call, because several ranks write to the same terminal.
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
  // A rank on another machine that has ended may be in `missing` twice.
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

namespace {

constexpr milliseconds kTick{200};

/// Blocks all signals on this thread, so that the program's signal handlers do not run on this
/// thread.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

/// The beginning of an error message about a collective.
std::string beginning(const WorldWatch& world, const BegunCall& call) {
  const auto known = flight::read_call(world.own(), call.order);
  return detail::concat(known ? flight::to_text(world.own(), known->label) : "a collective",
                        ", rank ", world.settings().rank, ": ");
}

}  // namespace

void Watchdog::stop() {
  // The calls are destroyed without the lock, because destroying a call may destroy a World.
  std::vector<DeviceCall> left;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
    left.swap(added_);
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
  std::exchange(calls_, {}).clear();
}

void Watchdog::await(std::function<bool()> is_done, const BegunCall& call,
                     std::shared_ptr<const WatchedGroup> group) {
  const std::lock_guard lock(mutex_);
  if (stops_) {
    return;
  }
  set_waits(world_.own(), call, true);
  added_.push_back({std::move(is_done), call, std::move(group)});
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  }
}

void Watchdog::run() {
  block_signals();
  pthread_setname_np(pthread_self(), "tessera-watch");
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kTick, [this] { return stops_; })) {
    std::ranges::move(added_, std::back_inserter(calls_));
    added_.clear();
    lock.unlock();
    tick();
    lock.lock();
  }
}

void Watchdog::tick() {
  const auto ended = std::erase_if(calls_, [this](const DeviceCall& call) {
    try {
      if (!call.is_done()) {
        return false;
      }
    } catch (const std::exception& error) {
      end_process(call.call, error.what());
    }
    return true;
  });
  if (ended != 0) {
    // The CPU runs ahead of the GPU, so the time-out of the next call starts when the GPU begins
    // that call.
    wait_.reset();
  }
  // If this rank has aborted, it has already reported why.
  if (!calls_.empty() && world_.own().state.load() == flight::RankState::kRunning) {
    look_at(calls_.front());
  }
}

/// Ends the process if a collective cannot complete. A rank that has ended may have done its part
/// of the collective before, so the device gets a moment to finish.
void Watchdog::look_at(const DeviceCall& device) {
  constexpr milliseconds kDying{1500};
  const BegunCall& call = device.call;
  if (!wait_) {
    lost_since_.reset();
    wait_.emplace(world_, device.group, call.number, world_.settings().timeout,
                  [this, call] { return beginning(world_, call); });
  }
  const auto not_begun = [&] { return world_.not_begun(*device.group, call.number); };
  const auto missing = [&] { return world_.not_in(*device.group, call.number); };
  if (const std::string lost = wait_->why_lost(not_begun); !lost.empty()) {
    end_process(call, lost);
  }
  if (const std::string lost = wait_->why_lost(missing); !lost.empty()) {
    lost_since_ = lost_since_.value_or(Clock::now());
    if (Clock::now() - *lost_since_ >= kDying) {
      end_process(call, lost);
    }
  }
  if (const std::string late = wait_->why_late(missing); !late.empty()) {
    end_process(call, late);
  }
}

void Watchdog::end_process(const BegunCall& call, const std::string& why) const {
  if (world_.first_to_end(ranks_of_world(world_.own().size))) {
    wait_for_first_failure();
  }
  // The line is written by one call, because several ranks write to the same terminal.
  std::fputs(("error: " + beginning(world_, call) + why + "\n").c_str(), stderr);
  world_.give_up();
  std::_Exit(EXIT_FAILURE);
}

namespace {

constexpr auto kSetUp = "set-up";

std::string here_key(int rank) {
  return "here/" + std::to_string(rank);
}

/// Keys of a c10d store, each with the rank that sets the key.
using Keys = std::vector<std::pair<std::string, int>>;

constexpr std::chrono::microseconds kFirstNap{200};
constexpr std::chrono::microseconds kLongestNap{100'000};

/// Returns the result of `question`, a function of the store. Throws PeerError if the store does
/// not answer within the time-out.
template <class Question>
auto answer_of(const detail::StorePtr& store, const GroupInfo& group, Question question) {
  auto answer = ask(store, std::move(question));
  PeerWait wait(group, kSetUp);
  for (auto nap = kFirstNap; !arrives(answer, nap); nap = std::min(2 * nap, kLongestNap)) {
    wait.check([] { return std::vector<int>(); });  // the missing ranks are unknown
  }
  return answer.get();
}

/// Returns the ranks whose keys are not set in the store.
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

/// Decides whether all ranks of the World take part within kTogetherWithin. The first rank of each
/// group calls this function. The first decision applies to all groups.
std::string decide(detail::Store& store, int group_size, int world_size,
                   const std::string& meeting) {
  constexpr std::chrono::milliseconds kNap{5};
  const std::string decision = meeting + "/decision";
  // The groups are disjoint, because each rank takes part with only one group at a time. So the sum
  // of their sizes is the number of ranks.
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
