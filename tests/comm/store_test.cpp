// Tests what ranks read from the job's key-value store: which ranks have joined the rendezvous or a
// process group, and what the ranks on other hosts do.
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "group_info.h"
#include "rendezvous/rendezvous_wait.h"
#include "testing/errors.h"
#include "testing/ranks.h"
#include "watch/watch.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// A store that has lost its connection: check() throws.
class LostStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& /*keys*/) override {
    throw std::runtime_error("the connection is closed");
  }
};

JobVariables rank_of_job(int rank, int size) {
  JobVariables job;
  job.rank = rank;
  job.size = size;
  job.address = "host";
  job.port = 7;
  return job;
}

TEST(Rendezvous, NamesTheLostStore) {
  const auto store = c10::make_intrusive<LostStore>();
  const JobVariables job = rank_of_job(1, 3);
  const RecordPtr own = make_record(WatchSettings{}, job.size, "");
  EXPECT_ERROR(await_all_ranks(*store, job, {}, own), "rank 1 of 3 lost", "the store at host:7",
               "rank(s) 0, 2 did not join: the connection is closed");
}

// If nodes start different numbers of ranks, two processes can claim the same rank.
TEST(Rendezvous, RefusesDifferentWorldSizesAndASecondProcessOfARank) {
  struct Second {
    int rank, size;
    const char* words;
  };
  for (const Second& second : {Second{1, 2, "start all nodes with equal numbers of nodes"},
                               Second{0, 2, "start all nodes with equal numbers of nodes"},
                               Second{0, 4, "two processes have joined"}}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto arrive = [&](int rank, int size) {
      const JobVariables job = rank_of_job(rank, size);
      WatchSettings settings;
      settings.rank = rank;
      const RecordPtr own = make_record(settings, size, "");
      EXPECT_ERROR(await_all_ranks(*store, job, {.timeout = std::chrono::seconds(20)}, own),
                   " at host:7", second.words);
    };
    std::thread waits(arrive, 0, 4);
    while (!store->check({"host/0"})) {
      std::this_thread::yield();
    }
    arrive(second.rank, second.size);
    waits.join();
  }
}

// A rank's process must run until the other ranks have opened the rank's flight record.
TEST(Rendezvous, EndsAfterAllRanksHaveOpenedAllRecords) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto arrive = [&](int rank) {
    const JobVariables job = rank_of_job(rank, 2);
    WatchSettings settings;
    settings.rank = rank;
    await_all_ranks(*store, job, {}, make_record(settings, job.size, ""));
    EXPECT_TRUE(store->check({"opened/0", "opened/1"}));
  };
  std::thread waits(arrive, 0);
  arrive(1);
  waits.join();
}

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Returns the WorldWatch of a rank that cannot read the flight records of other ranks.
WorldWatchPtr watch_of(int rank, int world_size, const StorePtr& store = nullptr) {
  WatchSettings settings;
  settings.rank = rank;
  settings.timeout = std::chrono::seconds(10);
  std::vector<RecordPtr> records(static_cast<std::size_t>(world_size));
  records[static_cast<std::size_t>(rank)] = make_record(settings, world_size, "");
  return std::make_shared<WorldWatch>(settings, std::move(records), store);
}

/// Calls all_come_at_once() as a rank that has already made `earlier` process groups named "tp".
bool comes_with_all(const StorePtr& store, int rank, int world_size, const std::vector<int>& ranks,
                    int earlier) {
  const int index = static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
  const auto watch = std::make_shared<GroupWatch>(watch_of(rank, world_size), "tp", ranks);
  const GroupInfo group{"tp", ranks, index, std::chrono::seconds(10), watch};
  const StorePtr own = c10::make_intrusive<c10d::PrefixStore>(join(ranks), store);
  return all_come_at_once(store, own, group, world_size, "tp/" + std::to_string(earlier));
}

TEST(AllComeAtOnce, IsTrueIfTheGroupsTogetherContainAllRanks) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  RunRanks(4, [&](Rank& rank) {
    const int r = rank.rank();
    const int column = r % 2, row = r / 2;
    EXPECT_TRUE(comes_with_all(store, r, 4, {2 * row, 2 * row + 1}, 0));
    EXPECT_TRUE(comes_with_all(store, r, 4, {column, column + 2}, 1));
  });
}

// Ranks 1 and 2 make a group "tp": the second such group of rank 1, and the first of rank 2.
TEST(AllComeAtOnce, IsFalseIfRanksMadeDifferentNumbersOfGroups) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  RunRanks(3, [&](Rank& rank) {
    const int r = rank.rank();
    if (r < 2) {
      EXPECT_FALSE(comes_with_all(store, r, 3, {0, 1}, 0));
    }
    if (r > 0) {
      EXPECT_FALSE(comes_with_all(store, r, 3, {1, 2}, r == 1 ? 1 : 0));
    }
  });
}

/// A store without a running server: no call returns before the future `end` is ready.
class SilentStore final : public c10d::HashStore {
 public:
  explicit SilentStore(std::shared_future<void> end) : end_(std::move(end)) {}
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    const std::lock_guard lock(await_end());
    HashStore::set(key, value);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    const std::lock_guard lock(await_end());
    return HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    const std::lock_guard lock(await_end());
    return HashStore::check(keys);
  }

 private:
  std::mutex& await_end() {
    end_.wait();
    return mutex_;
  }

  std::shared_future<void> end_;
  std::mutex mutex_;
};

TEST(UnresponsiveStore, CausesATimeOut) {
  std::promise<void> end;
  const StorePtr store = c10::make_intrusive<SilentStore>(end.get_future().share());
  const std::vector<int> ranks{0, 1};
  const auto watch = std::make_shared<GroupWatch>(watch_of(0, 2), "tp", ranks);
  watch->begin("set-up");
  const GroupInfo group{"tp", ranks, 0, std::chrono::seconds(1), watch};
  const auto late = "rank(s) 1 did not arrive for 1";
  EXPECT_ERROR(meet(store, group), late);
  EXPECT_ERROR(all_come_at_once(store, store, group, 2, "tp/0"), late);
  EXPECT_ERROR(value_of(store, group, "key"), late);
  end.set_value();
}

GroupInfo group_of_all(int rank, const WorldWatchPtr& world) {
  const std::vector<int> all = {0, 1, 2};
  const auto watch = std::make_shared<GroupWatch>(world, "all", all);
  watch->leaves(watch->begin("set-up"));
  watch->begin("barrier");
  return {"all", all, rank, milliseconds(2000), watch};
}

/// Waits in a barrier until PeerWait::check() throws. Returns the exception's message.
std::string error_of_wait(const GroupInfo& group) {
  PeerWait wait(group, "barrier");
  try {
    while (true) {
      wait.check();
      std::this_thread::sleep_for(milliseconds(20));
    }
  } catch (const std::exception& error) {
    return error.what();
  }
}

TEST(RemoteRanks, AreNamedAfterTheTimeOut) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const GroupInfo first = group_of_all(0, watch_of(0, 3, store));
  const GroupInfo second = group_of_all(1, watch_of(1, 3, store));
  std::string error_of_second;
  std::thread waits([&] { error_of_second = error_of_wait(second); });
  const std::string error = error_of_wait(first);
  waits.join();
  EXPECT_CONTAINS(error, "barrier in group 'all'", "rank 0: rank(s) 2 did not arrive for 2");
  EXPECT_CONTAINS(error_of_second, "rank 1: rank(s) 2 did not arrive for 2");
}

TEST(RemoteRanks, AreNamedSoonAfterGivingUp) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  GroupInfo group = group_of_all(0, watch_of(0, 3, store));
  group.timeout = std::chrono::seconds(60);
  const WorldWatchPtr other = watch_of(2, 3, store);
  other->set_step(7);
  std::thread fails([&] {
    std::this_thread::sleep_for(milliseconds(300));
    other->give_up();
  });
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_CONTAINS(error_of_wait(group), "rank 2 gave up", "after step 7; look for its error");
  EXPECT_LT(std::chrono::steady_clock::now() - begun, milliseconds(2300));
  fails.join();
}

TEST(GroupWatch, GivesConcurrentThreadsSeparateSlots) {
  constexpr int kThreads = 4;
  constexpr int kEach = 12;
  for (int round = 0; round < 20; ++round) {
    std::latch all_here(kThreads);
    const WorldWatchPtr world = watch_of(0, 3);
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
