// A rank of another host that is at work on files is waited for.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "group_info.h"
#include "tessera/comm/detail/rank_threads.h"
#include "watch/group_watch.h"
#include "watch/peer_wait.h"
#include "watch/remote_peers.h"
#include "watch/world_watch.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// The watch of one of two ranks that cannot read each other's records.
WorldWatchPtr watch_on_own_host(int rank, const c10::intrusive_ptr<c10d::Store>& store) {
  WatchSettings settings;
  settings.rank = rank;
  settings.timeout = std::chrono::seconds(10);
  std::vector<RecordPtr> records(2);
  records[static_cast<std::size_t>(rank)] = make_record(settings, 2, "");
  return std::make_shared<WorldWatch>(settings, std::move(records),
                                      std::make_unique<RemotePeers>(store));
}

TEST(RemoteWork, CountsForTheTimeOut) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::vector<int> both = {0, 1};
  const auto end = steady_clock::now() + milliseconds(2300);
  std::thread busy([&, world = watch_on_own_host(1, store)] {
    GroupWatch group(world, "all", both);
    group.done(group.begin("barrier", "", 0));
    while (steady_clock::now() < end) {
      note_progress(flight::Work::kWriting);
      std::this_thread::sleep_for(milliseconds(50));
    }
  });
  const auto group = std::make_shared<GroupWatch>(watch_on_own_host(0, store), "all", both);
  const GroupInfo info{"all", both, 0, milliseconds(1700), group};
  PeerWait wait(info, "barrier");
  while (steady_clock::now() < end) {
    EXPECT_NO_THROW(wait.check([] { return std::vector<int>(); }));
    std::this_thread::sleep_for(milliseconds(50));
  }
  busy.join();
}

TEST(GroupWatch, ThreadsThatMakeGroupsAtOnceHaveASlotEach) {
  constexpr int kThreads = 4;
  constexpr int kEach = 12;
  for (int round = 0; round < 20; ++round) {
    std::latch all_here(kThreads);
    const WorldWatchPtr world = watch_on_own_host(0, c10::make_intrusive<c10d::HashStore>());
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
    EXPECT_EQ(flight::read(world->own()).groups.size(), std::size_t{kThreads * kEach});
  }
}

TEST(Advice, IsGivenOnce) {
  EXPECT_EQ(advice_behind("rank 1 sleeps"), "; look at what they do instead");
  EXPECT_EQ(advice_behind("rank 1 gave up after step 3; look for its error"), "");
}

/// The record has no slot left for it.
TEST(Work, IsCountedForAnUnlistedThread) {
  const WorldWatchPtr world = watch_on_own_host(0, c10::make_intrusive<c10d::HashStore>());
  std::int64_t other = 1;
  for (flight::ThreadSlot& slot : world->own().threads) {
    slot.id.store(other++);
  }
  std::jthread([&] {
    GroupWatch group(world, "all", {0, 1});
    group.done(group.begin("barrier", "", 0));
    note_progress(flight::Work::kReading);
  });
  EXPECT_EQ(world->own().threads.back().id.load(), flight::kSeveralThreads);
  EXPECT_GT(world->own().threads.back().worked.load(), 0);
}

}  // namespace
}  // namespace tessera::comm
