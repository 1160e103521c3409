// What a group of several hosts does beside the collectives themselves: what it sends between
// hosts, and that it sends it while the ranks compute.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>

#include "group_of_all.h"
#include "testing/environment.h"
#include "testing/errors.h"

namespace tessera::comm {
namespace {

using LinkBytes = std::array<std::int64_t, 4>;  // of each rank

constexpr std::int64_t kElements = 100;
constexpr std::int64_t kBytes = 4 * kElements;

/// What each of four ranks sends to other hosts in a collective of `kBytes` for each rank.
LinkBytes link_bytes(const std::string& hosts, bool shared_memory,
                     const std::function<WorkPtr(Communicator&)>& call) {
  const testing::SharedMemory shared(shared_memory);
  LinkBytes bytes{};
  run_on_hosts(hosts, [&](Rank& rank) {
    call(*group_of_all(*rank.world()))->wait();
    bytes[static_cast<std::size_t>(rank.rank())] =
        total(rank.world()->traffic().table()).link_bytes;
  });
  return bytes;
}

WorkPtr gather_hundred(Communicator& group) {
  return group.all_gather(at::empty({4 * kElements}), at::zeros({kElements}));
}

WorkPtr scatter_hundred(Communicator& group) {
  return group.reduce_scatter(at::empty({kElements}), at::zeros({4 * kElements}), ReduceOp::kSum);
}

WorkPtr sum_hundreds(Communicator& group) {
  return group.all_reduce(at::zeros({4 * kElements}), ReduceOp::kSum);
}

WorkPtr broadcast_from_1(Communicator& group) {
  return group.broadcast(at::zeros({kElements}), 1);
}

WorkPtr exchange_hundreds(Communicator& group) {
  const std::vector<std::int64_t> counts(4, kElements);
  return group.all_to_all(at::empty({4 * kElements}), at::zeros({4 * kElements}), counts, counts);
}

TEST(LinkBytes, AreThoseOfOneRankOfEachHost) {
  EXPECT_EQ(link_bytes("aabb", true, gather_hundred), (LinkBytes{2 * kBytes, 0, 2 * kBytes, 0}));
  EXPECT_EQ(link_bytes("abba", true, gather_hundred), (LinkBytes{2 * kBytes, 2 * kBytes, 0, 0}));
  EXPECT_EQ(link_bytes("aaab", true, gather_hundred), (LinkBytes{3 * kBytes, 0, 0, kBytes}));
  EXPECT_EQ(link_bytes("aabb", true, scatter_hundred), (LinkBytes{2 * kBytes, 0, 2 * kBytes, 0}));
  EXPECT_EQ(link_bytes("aaab", true, scatter_hundred), (LinkBytes{kBytes, 0, 0, 3 * kBytes}));
  EXPECT_EQ(link_bytes("aabb", true, sum_hundreds), (LinkBytes{4 * kBytes, 0, 4 * kBytes, 0}));
  EXPECT_EQ(link_bytes("aabb", true, broadcast_from_1), (LinkBytes{kBytes, 0, 0, 0}));
}

TEST(LinkBytes, AreThoseOfEachRankWhereHostsShareNoMemory) {
  // A ring leaves each host once. Without it each rank sends to each other.
  EXPECT_EQ(link_bytes("aabb", false, gather_hundred), (LinkBytes{0, 3 * kBytes, 0, 3 * kBytes}));
  EXPECT_EQ(link_bytes("abab", false, gather_hundred),
            (LinkBytes{3 * kBytes, 3 * kBytes, 3 * kBytes, 3 * kBytes}));
  EXPECT_EQ(link_bytes("aabb", false, scatter_hundred),
            (LinkBytes{2 * kBytes, 2 * kBytes, 2 * kBytes, 2 * kBytes}));
  EXPECT_EQ(link_bytes("aabb", false, sum_hundreds), (LinkBytes{0, 6 * kBytes, 0, 6 * kBytes}));
  // From 1 to 2, from both to 3 and 0.
  EXPECT_EQ(link_bytes("aabb", false, broadcast_from_1), (LinkBytes{0, 2 * kBytes, kBytes, 0}));
}

TEST(LinkBytes, OfAnAllToAllAreThoseOfEachPair) {
  for (const bool shared_memory : {false, true}) {
    EXPECT_EQ(link_bytes("aaab", shared_memory, exchange_hundreds),
              (LinkBytes{kBytes, kBytes, kBytes, 3 * kBytes}));
  }
}

TEST(LinkBytes, AreNoneWithinAHost) {
  for (const bool shared_memory : {false, true}) {
    EXPECT_EQ(link_bytes("aaaa", shared_memory, gather_hundred), LinkBytes{});
  }
}

TEST(Hierarchy, MovesDataWhileItsRanksComputeAndDoNotWait) {
  std::atomic<int> have_all = 0;
  run_on_hosts("aabb", [&](Rank& rank) {
    const CommunicatorPtr group = group_of_all(*rank.world());
    ASSERT_EQ(group->name(), "hierarchical");
    const at::Tensor output = at::empty({4});
    const WorkPtr work = group->all_gather(output, at::full({1}, 1.0));
    // The first of each host comes back to it after the others have their data.
    const bool leads = rank.rank() % 2 == 0;
    while (leads && have_all < 2) {
      std::this_thread::yield();
    }
    work->wait();
    EXPECT_TRUE(at::equal(output, at::full({4}, 1.0)));
    ++have_all;
  });
}

TEST(Hierarchy, EndsAllRanksWhereTheCallsOfAHostDiffer) {
  const auto errors = testing::ErrorsOfRanks(
      4,
      [](Rank& rank) {
        const CommunicatorPtr group = group_of_all(*rank.world());
        group->barrier();
        group->all_reduce(at::zeros({rank.rank() == 3 ? 5 : 4}), ReduceOp::kSum)->wait();
      },
      on_hosts("aabb"));
  EXPECT_CONTAINS(errors[2], "rank 3 calls all_reduce", "5 elements of Float");
  EXPECT_CONTAINS(errors[0], "all_reduce in group 'all' (ranks 0, 1, 2, 3), rank 0");
  EXPECT_CONTAINS(errors[1], "all_reduce in group 'all' (ranks 0, 1, 2, 3), rank 1");
}

}  // namespace
}  // namespace tessera::comm
