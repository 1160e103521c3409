// Tests worlds that are made from a c10d process group or by a broadcast, without a launcher.
#include "tessera/comm/process_group_world.h"

#include <ATen/ops/full.h>

#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "group_of_all.h"
#include "tessera/internals/detail/c10d.h"

namespace tessera::comm {
namespace {

std::vector<WorldPtr> worlds_of_groups(
    int size, const std::function<WorldPtr(const detail::GroupPtr& group)>& make) {
  // thread_worlds() turns off libtorch's flight recorder, which has data races between threads.
  thread_worlds(1);
  const detail::StorePtr store = detail::memory_store();
  std::vector<WorldPtr> worlds(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      worlds[static_cast<std::size_t>(rank)] =
          make(detail::make_gloo_group(store, {.rank = rank,
                                               .size = size,
                                               .timeout = std::chrono::seconds(30),
                                               .address = "127.0.0.1"}));
    });
  }
  std::ranges::for_each(threads, &std::thread::join);
  return worlds;
}

void expect_sum_of_ranks(testing::Rank& rank) {
  const at::Tensor value = at::full({1}, rank.rank() + 1, at::kLong);
  group_of_all(*rank.world())->all_reduce(value, ReduceOp::kSum)->wait();
  EXPECT_EQ(value.item<std::int64_t>(), rank.size() * (rank.size() + 1) / 2);
}

TEST(ProcessGroupWorld, HasTheRanksOfABackend) {
  testing::RunRanks(2, expect_sum_of_ranks,
                    {.make_worlds = [](int size, const WorldOptions& options) {
                      return worlds_of_groups(size, [&](const detail::GroupPtr& group) {
                        WorldPtr world = world_from_process_group(*group, options);
                        EXPECT_EQ(world->rank(), group->getRank());
                        EXPECT_EQ(world->local_rank(), group->getRank());
                        return world;
                      });
                    }});
}

TEST(ProcessGroupWorld, HasTheRanksOfAProcessGroup) {
  using ProcessGroup = c10d::ProcessGroup;
  testing::RunRanks(
      2, expect_sum_of_ranks, {.make_worlds = [](int size, const WorldOptions& options) {
        return worlds_of_groups(size, [&](const detail::GroupPtr& backend) {
          const auto group = c10::make_intrusive<ProcessGroup>(backend->getRank(), size);
          group->setBackend(c10::kCPU, ProcessGroup::BackendType::GLOO, backend);
          group->setDefaultBackend(ProcessGroup::BackendType::GLOO);
          return world_from_process_group(*group, options);
        });
      }});
}

TEST(BroadcastWorld, OfOneRankDoesNotBroadcast) {
  const WorldPtr world = world_from_broadcast(0, 1, nullptr);
  EXPECT_EQ(world->size(), 1);
  EXPECT_EQ(world->rank(), 0);
}

TEST(BroadcastWorld, RefusesInvalidRanksAndAnEmptyBroadcast) {
  EXPECT_ERROR(world_from_broadcast(2, 2, [](void*, std::size_t) {}), "rank 2 of 2 ranks");
  EXPECT_ERROR(world_from_broadcast(0, 2, nullptr), "broadcast is empty");
}

TEST(BroadcastWorld, FailsOnAllRanksIfRank0CannotOpenAStore) {
  const testing::ScopedVariable interface("GLOO_SOCKET_IFNAME", "no-such-interface");
  worlds_of_groups(2, [](const detail::GroupPtr& group) {
    EXPECT_ERROR(world_from_process_group(*group), "rank 0 of 2", "no-such-interface");
    return nullptr;
  });
}

}  // namespace
}  // namespace tessera::comm
