// Ranks on other hosts, which the store alone shows.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "group_info.h"
#include "testing/errors.h"
#include "watch/peer_wait.h"
#include "watch/world_watch.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// The watch of one of three ranks that cannot read each other's records.
WorldWatchPtr watch_on_own_host(int rank, const c10::intrusive_ptr<c10d::Store>& store) {
  WatchSettings settings;
  settings.rank = rank;
  std::vector<RecordPtr> records(3);
  records[static_cast<std::size_t>(rank)] = make_record(settings, 3, "");
  return std::make_shared<WorldWatch>(settings, std::move(records), store);
}

GroupInfo group_of_all(int rank, const WorldWatchPtr& world) {
  const std::vector<int> all = {0, 1, 2};
  const auto watch = std::make_shared<GroupWatch>(world, "all", all);
  watch->leaves(watch->begin("set-up"));
  watch->begin("barrier");
  return {"all", all, rank, milliseconds(600), watch};
}

/// Waits until a PeerError, and returns its message.
std::string error_of_wait(const GroupInfo& group) {
  PeerWait wait(group, "barrier");
  try {
    while (true) {
      wait.check([&] { return group.watch->not_in(group.watch->number()); });
      std::this_thread::sleep_for(milliseconds(20));
    }
  } catch (const std::exception& error) {
    return error.what();
  }
}

TEST(RemoteRanks, AreNamedIfTheyDoNotComeInTime) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const GroupInfo first = group_of_all(0, watch_on_own_host(0, store));
  const GroupInfo second = group_of_all(1, watch_on_own_host(1, store));
  std::string error_of_second;
  std::thread waits([&] { error_of_second = error_of_wait(second); });
  const std::string error = error_of_wait(first);
  waits.join();
  EXPECT_CONTAINS(error, "barrier in group 'all'",
                  "rank 0: rank(s) 2 did not arrive within 600 ms");
  EXPECT_CONTAINS(error_of_second, "rank 1: rank(s) 2 did not arrive within 600 ms");
}

TEST(RemoteRanks, AreNamedOnceTheyGiveUp) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  GroupInfo group = group_of_all(0, watch_on_own_host(0, store));
  group.timeout = std::chrono::seconds(60);
  const WorldWatchPtr other = watch_on_own_host(2, store);
  other->set_step(7);
  std::thread fails([&] {
    std::this_thread::sleep_for(milliseconds(300));
    other->give_up();
  });
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_CONTAINS(error_of_wait(group), "rank 2 gave up after step 7; look for its error");
  EXPECT_LT(std::chrono::steady_clock::now() - begun, milliseconds(2300));
  fails.join();
}

TEST(GroupWatch, ThreadsThatMakeGroupsAtOnceHaveASlotEach) {
  constexpr int kThreads = 4;
  constexpr int kEach = 12;
  for (int round = 0; round < 20; ++round) {
    std::latch all_here(kThreads);
    const WorldWatchPtr world = watch_on_own_host(0, nullptr);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        all_here.arrive_and_wait();
        for (int j = 0; j < kEach; ++j) {
          GroupWatch(world, std::to_string(i) + "." + std::to_string(j), {0, 1});
        }
      });
    }
    std::ranges::for_each(threads, &std::thread::join);
    EXPECT_EQ(std::ranges::count_if(world->own().groups,
                                    [](const flight::GroupSlot& slot) { return slot.id != 0; }),
              kThreads * kEach);
  }
}

}  // namespace
}  // namespace tessera::comm
