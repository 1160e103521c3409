// How the ranks of groups find out, through a store, who has come.
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "testing/errors.h"
#include "testing/ranks.h"
#include "watch/store_sync.h"
#include "watch/world_watch.h"

namespace tessera::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// What a rank of a world writes down, without a watchdog and without peers that it sees.
WorldWatchPtr watch_of(int rank, int world_size) {
  WatchSettings settings;
  settings.rank = rank;
  settings.timeout = std::chrono::seconds(10);
  std::vector<RecordPtr> records(static_cast<std::size_t>(world_size));
  records[static_cast<std::size_t>(rank)] = make_record(settings, world_size, "");
  return std::make_shared<WorldWatch>(settings, std::move(records), nullptr);
}

/// The call of a rank that makes the group `ranks` after `earlier` groups of the same name.
bool comes_with_all(const StorePtr& store, int rank, int world_size, const std::vector<int>& ranks,
                    int earlier) {
  const int index = static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
  const auto watch = std::make_shared<GroupWatch>(watch_of(rank, world_size), "tp", ranks);
  const GroupInfo group{"tp", ranks, index, std::chrono::seconds(10), watch};
  const StorePtr own = c10::make_intrusive<c10d::PrefixStore>(join(ranks), store);
  return all_come_at_once(store, own, group, world_size, "tp/" + std::to_string(earlier));
}

TEST(AllComeAtOnce, HoldsWhereTheGroupsTogetherHoldAllRanks) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  RunRanks(4, [&](Rank& rank) {
    const int r = rank.rank();
    const int column = r % 2, row = r / 2;
    EXPECT_TRUE(comes_with_all(store, r, 4, {2 * row, 2 * row + 1}, 0));
    EXPECT_TRUE(comes_with_all(store, r, 4, {column, column + 2}, 1));
  });
}

// Rank 2 is in its first group of the name when rank 1 is in its second.
TEST(AllComeAtOnce, RanksOfAGroupMayHaveMadeDifferentNumbersOfGroups) {
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

/// As that of a process that is stopped: no call ends, and each waits for the one before.
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

TEST(Meet, ASilentStoreIsWaitedForUntilTheTimeOut) {
  std::promise<void> end;
  const StorePtr store = c10::make_intrusive<SilentStore>(end.get_future().share());
  const std::vector<int> ranks{0, 1};
  const auto watch = std::make_shared<GroupWatch>(watch_of(0, 2), "tp", ranks);
  const GroupInfo group{"tp", ranks, 0, std::chrono::seconds(1), watch};
  const auto late = "no rank is known to be missing, but the call did not end within 1000 ms";
  EXPECT_ERROR(meet(store, group), late);
  EXPECT_ERROR(all_come_at_once(store, store, group, 2, "tp/0"), late);
  EXPECT_ERROR(value_from(store, group, 1, "key"), late);
  end.set_value();
}

}  // namespace
}  // namespace tessera::comm
