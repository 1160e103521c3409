// Tests that a backward uses the thread-local state of the thread that called backward(). In this
// program, a backward runs on another thread, as with CUDA (testing/backward_thread.cpp).

#include <thread>

#include "dtensor/listing_mode.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/random.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;

/// Computes `tensor` * 2 and runs backward. A hook calls `body` with the product's gradient.
void within_backward(const at::Tensor& tensor, const std::function<void(const at::Tensor&)>& body) {
  const at::Tensor leaf = tensor.detach().requires_grad_();
  const at::Tensor result = leaf.mul(2);
  result.register_hook([&](const at::Tensor& gradient) { body(gradient); });
  result.mul(result).sum().backward();
}

at::Tensor sharded_rows(Rank& rank) {
  return distribute_tensor(values({4, 3}), rank.mesh({rank.size()}, {"dp"}), {Shard{0}}).tensor();
}

TEST(BackwardThread, DiffersFromTheCallingThread) {
  const std::thread::id caller = std::this_thread::get_id();
  within_backward(at::ones({2}),
                  [&](const at::Tensor&) { EXPECT_NE(std::this_thread::get_id(), caller); });
}

TEST_ON_RANKS(BackwardThread, UsesTheStrictScopeOfItsCaller, 2) {
  const at::Tensor x = sharded_rows(rank);
  const auto gather = [](const at::Tensor& gradient) { gradient.cumsum(0); };
  {
    const StrictScope strict;
    EXPECT_ERROR(within_backward(x, gather), "the strict scope refuses");
    const StrictScope lenient(false);
    within_backward(x, gather);
  }
  within_backward(x, gather);
}

TEST_ON_RANKS(BackwardThread, CountsItsRedistributionsForItsRank, 2) {
  const auto before = implicit_redistributions();
  within_backward(sharded_rows(rank), [](const at::Tensor& gradient) { gradient.cumsum(0); });
  EXPECT_EQ(implicit_redistributions(), before + 1);
}

TEST_ON_RANKS(BackwardThread, RunsFinalCallbacksForItsRank, 2) {
  const auto before = implicit_redistributions();
  within_backward(sharded_rows(rank), [](const at::Tensor& gradient) {
    detail::call_at_end_of_backward([gradient] { gradient.cumsum(0); });
  });
  EXPECT_EQ(implicit_redistributions(), before + 1);
}

TEST_ON_RANKS(BackwardThread, CountsItsDispatchCacheMisses, 2) {
  const at::Tensor x = sharded_rows(rank);
  const auto misses_of_backward = [&] {
    detail::DispatchCacheStatistics before;
    within_backward(x, [&](const at::Tensor& gradient) {
      before = detail::dispatch_cache_statistics();
      gradient.exp();
    });
    return detail::dispatch_cache_statistics().misses - before.misses;
  };
  EXPECT_GT(misses_of_backward(), 0u);
  EXPECT_EQ(misses_of_backward(), 0u);
}

TEST(BackwardThread, UsesTheOperatorModeOfItsCaller) {
  ListingMode mode;
  const at::Tensor x = at::ones({3}).requires_grad_();
  const at::Tensor y = x.exp();
  {
    const OperatorModeScope scope(mode);
    y.sum().backward();
  }
  EXPECT_EQ(mode.names,
            (std::vector<std::string>{"aten::sum", "aten::ones_like", "aten::mul.Tensor"}));
}

TEST_ON_RANKS(BackwardThread, DrawsTheNextRandomNumbersOfItsRank, 2) {
  const at::Tensor x = sharded_rows(rank);
  manual_seed(5);
  at::rand_like(x);
  const at::Tensor expected = at::rand_like(x);
  manual_seed(5);
  at::rand_like(x);
  within_backward(x, [&](const at::Tensor& gradient) {
    EXPECT_TRUE(at::equal(local_tensor(at::rand_like(gradient)), local_tensor(expected)));
  });
  EXPECT_EQ(random_state().calls, 2u);
}

TEST(BackwardThread, UsesTheBatchPartOfItsCaller) {
  const at::Tensor x = at::ones({4, 3});
  manual_seed(5);
  at::Tensor expected;
  {
    const BatchPart whole(0, 1);
    expected = at::rand_like(at::ones({8, 3}));
  }
  manual_seed(5);
  const BatchPart second(1, 2);
  within_backward(x, [&](const at::Tensor& gradient) {
    EXPECT_TRUE(at::equal(at::rand_like(gradient), expected.slice(0, 4)));
  });
}

/// Ranks can use two asynchronous results in different orders. All ranks must wait in the same
/// order, because otherwise collectives of several rounds would deadlock.
TEST_ON_MESH(BackwardThread, WaitsForTransfersInTheOrderOfTheForward, {2, 2}, {"dp", "tp"}) {
  constexpr std::int64_t kLarge = 3 << 20;
  const auto x = distribute_tensor(at::arange(kLarge), mesh, {Shard{0}, Replicate{}});
  const auto y = distribute_tensor(at::arange(kLarge), mesh, {Replicate{}, Shard{0}});
  const RedistributeOptions async{.async = true};
  const auto a = x.redistribute({Replicate{}, Replicate{}}, async);
  const auto b = y.redistribute({Replicate{}, Replicate{}}, async);
  within_backward(at::ones({2}), [&](const at::Tensor&) {
    const auto& first = rank.rank() == 1 ? a : b;
    EXPECT_EQ(first.to_local()[kLarge - 1].item<std::int64_t>(), kLarge - 1);
    EXPECT_TRUE(at::equal(a.to_local(), b.to_local()));
  });
}

TEST(BackwardThread, RethrowsErrorsToItsCaller) {
  EXPECT_ERROR(within_backward(at::ones({2}), [](const at::Tensor&) { fail("from a hook"); }),
               "from a hook");
}

}  // namespace
}  // namespace tessera
