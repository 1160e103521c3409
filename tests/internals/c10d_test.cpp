// Canaries: c10d's stores, and its process groups by that of Gloo.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/internals/detail/c10d.h"

namespace tessera::detail {
namespace {

using namespace std::chrono_literals;

/// libtorch's flight record races between ranks that are threads of one process.
[[maybe_unused]] const int kNoRecord = setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);

TEST(C10dStoreCanary, KeepsWhatIsSetBelowAPrefix) {
  const StorePtr store = memory_store();
  const StorePtr below = store_below("a", store);
  below->set("key", "value");
  EXPECT_TRUE(store->check({"a/key"}));
  EXPECT_FALSE(store->check({"key"}));
  EXPECT_EQ(below->get_to_str("key"), "value");
  EXPECT_EQ(below->add("count", 2), 2);
  EXPECT_EQ(below->clone()->add("count", 1), 3);
}

TEST(C10dStoreCanary, KnowsAStoreInMemoryBelowPrefixes) {
  const StorePtr store = memory_store();
  EXPECT_TRUE(is_in_memory(store));
  EXPECT_TRUE(is_in_memory(store_below("a", store_below("b", store))));
}

TEST(C10dStoreCanary, OnAServerIsSeenByItsClients) {
  constexpr std::uint16_t kAny = 0;
  const StorePtr server =
      connect_store({.address = "127.0.0.1", .port = kAny, .serves = true, .timeout = 10s});
  EXPECT_NE(port_of(server), kAny);
  server->set("key", "value");
  const StorePtr same = server->clone();
  EXPECT_EQ(same->get_to_str("key"), "value");
  EXPECT_EQ(same->add("count", 1), 1);
  EXPECT_EQ(server->add("count", 1), 2);
}

constexpr int kRanks = 2;

void on_two_ranks(const std::function<void(Group& group, int rank)>& body) {
  const StorePtr store = memory_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const GroupPtr group = make_gloo_group(
          store, {.rank = rank, .size = kRanks, .timeout = 30s, .address = "127.0.0.1"});
      body(*group, rank);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

at::Tensor of_rank(int rank) {
  return at::full({2}, static_cast<double>(rank + 1));
}

const at::Tensor& of_both() {
  static const at::Tensor both = at::tensor({1.0F, 1.0F, 2.0F, 2.0F});
  return both;
}

TEST(C10dGroupCanary, GathersReducesAndSends) {
  on_two_ranks([](Group& group, int rank) {
    at::Tensor out = at::empty({4});
    start_all_gather(group, out, of_rank(rank))->wait();
    EXPECT_TRUE(at::equal(out, of_both()));

    at::Tensor sum = of_rank(rank);
    start_all_reduce(group, sum, GroupReduceOp::SUM)->wait();
    EXPECT_TRUE(at::equal(sum, at::full({2}, 3.0)));

    at::Tensor from_first = of_rank(rank);
    start_broadcast(group, from_first, 0)->wait();
    EXPECT_TRUE(at::equal(from_first, of_rank(0)));

    at::Tensor received = at::empty({2});
    start_all_to_all(group, received, of_rank(rank), {1, 1}, {1, 1})->wait();
    EXPECT_TRUE(at::equal(received, at::tensor({1.0F, 2.0F})));
    start_barrier(group)->wait();
  });
}

TEST(C10dGroupCanary, ReducesAndScatters) {
  on_two_ranks([](Group& group, int rank) {
    at::Tensor out = at::empty({2});
    start_reduce_scatter(group, out, of_both(), GroupReduceOp::SUM)->wait();
    EXPECT_TRUE(at::equal(out, at::full({2}, 2.0 * (rank + 1))));
  });
}

TEST(C10dGroupCanary, MovesSeveralTensorsAtOnce) {
  on_two_ranks([](Group& group, int rank) {
    const std::vector<at::Tensor> gathered{at::empty({4}), at::empty({4})};
    start_all_gather(group, gathered, {of_rank(rank), of_rank(rank)})->wait();
    EXPECT_TRUE(at::equal(gathered[1], of_both()));
    const std::vector<at::Tensor> parts{at::empty({2})};
    start_reduce_scatter(group, parts, {of_both()}, GroupReduceOp::SUM)->wait();
    EXPECT_TRUE(at::equal(parts[0], at::full({2}, 2.0 * (rank + 1))));
  });
}

TEST(C10dGroupCanary, TellsAWorkThatIsOverFromOneThatIsNot) {
  on_two_ranks([](Group& group, int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(300ms);
      start_barrier(group)->wait();
      return;
    }
    at::Tensor sum = of_rank(rank);
    const GroupWorkPtr work = start_barrier(group);
    EXPECT_THROW(work->wait(20ms), std::exception);
    EXPECT_FALSE(work->isCompleted());
    EXPECT_TRUE(work->wait(10s));
    EXPECT_TRUE(work->isCompleted());
  });
}

}  // namespace
}  // namespace tessera::detail
