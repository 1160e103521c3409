// Tests every collective on every backend for CPUs. Expected values are computed from indices.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <random>

#include "group_of_all.h"

namespace tessera::comm {
namespace {

class Collectives : public OnBackend {};

TEST_P(Collectives, UseTheRequestedBackend) {
  run([](Rank& rank) {
    EXPECT_EQ(group_of_all(*rank.world())->name(), rank.size() == 1 ? "solo" : GetParam().backend);
  });
}

TEST_P(Collectives, AllGatherConcatenatesInRankOrder) {
  run([](Rank& rank) {
    for (const std::int64_t count : {0, 1, 7, 1000}) {
      const at::Tensor output = at::empty({rank.size() * count});
      group_of_all(*rank.world())->all_gather(output, numbers_from(rank.rank(), count))->wait();
      std::vector<at::Tensor> expected;
      for (int i = 0; i < rank.size(); ++i) {
        expected.push_back(numbers_from(i, count));
      }
      EXPECT_TRUE(at::equal(output, at::cat(expected)));
    }
  });
}

TEST_P(Collectives, AllGatherSupportsEveryTypeAndInPlaceOutput) {
  run([](Rank& rank) {
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar,
                            at::kShort, at::kInt, at::kLong, at::kBool, at::kComplexFloat}) {
      const at::Tensor output = at::empty({rank.size(), 3}, type),
                       in_place = at::zeros_like(output);
      const at::Tensor input = at::full({3}, rank.rank() % 2, type), own = in_place[rank.rank()];
      own.copy_(input);
      group_of_all(*rank.world())->all_gather(output, input)->wait();
      group_of_all(*rank.world())->all_gather(in_place, own)->wait();
      for (int i = 0; i < rank.size(); ++i) {
        EXPECT_TRUE(at::equal(output[i], at::full({3}, i % 2, type))) << type;
      }
      EXPECT_TRUE(at::equal(in_place, output)) << type;
    }
    // A tensor with a single element is contiguous, whatever its stride is; here, it is 4.
    const at::Tensor element = at::full({1, 4}, rank.rank(), at::kInt).select(1, 2);
    const at::Tensor elements = at::empty({rank.size()}, at::kInt);
    group_of_all(*rank.world())->all_gather(elements, element)->wait();
    EXPECT_TRUE(at::equal(elements, at::arange(rank.size(), at::kInt)));
  });
}

TEST_P(Collectives, AllReduceAveragesAndSumsAndMultipliesEveryType) {
  run([](Rank& rank) {
    const at::Tensor average = at::full({3}, rank.rank() + 1.0);
    group_of_all(*rank.world())->all_reduce(average, ReduceOp::kAvg)->wait();
    EXPECT_TRUE(at::equal(average, at::full({3}, (rank.size() + 1) / 2.0)));
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar,
                            at::kShort, at::kInt, at::kLong, at::kUInt16, at::kComplexFloat}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct}) {
        const at::Tensor tensor = at::full({5}, 2, type);
        group_of_all(*rank.world())->all_reduce(tensor, op)->wait();
        const int expected = op == ReduceOp::kSum ? 2 * rank.size() : 1 << rank.size();
        EXPECT_TRUE(at::equal(tensor, at::full({5}, expected, type))) << type;
      }
    }
  });
}

TEST_P(Collectives, MaximumAndMinimumOfBoolsNegativeNumbersAndNaN) {
  run([](Rank& rank) {
    const auto expect = [&](at::ScalarType type, int own, int largest, int smallest) {
      const at::Tensor most = at::full({3}, own, type), least = most.clone();
      group_of_all(*rank.world())->all_reduce(most, ReduceOp::kMax)->wait();
      group_of_all(*rank.world())->all_reduce(least, ReduceOp::kMin)->wait();
      EXPECT_TRUE(at::equal(most, at::full({3}, largest, type))) << type;
      EXPECT_TRUE(at::equal(least, at::full({3}, smallest, type))) << type;
    };
    expect(at::kBool, rank.rank() == 0, 1, rank.size() == 1);
    for (const auto type : {at::kChar, at::kShort, at::kInt, at::kLong, at::kFloat}) {
      expect(type, rank.rank() - 2, rank.size() - 3, -2);
    }
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (int of_nan = 0; of_nan < rank.size(); ++of_nan) {
        const at::Tensor most = at::full({3}, rank.rank() == of_nan ? NAN : 1.0, type);
        const at::Tensor least = most.clone();
        group_of_all(*rank.world())->all_reduce(most, ReduceOp::kMax)->wait();
        group_of_all(*rank.world())->all_reduce(least, ReduceOp::kMin)->wait();
        EXPECT_TRUE(most.isnan().all().item<bool>() && least.isnan().all().item<bool>()) << type;
      }
    }
  });
}

TEST_P(Collectives, AllReduceOfManySizes) {
  run([](Rank& rank) {
    // Tensor sizes in elements. Large tensors need several rounds of shared-memory transfers.
    for (const std::int64_t count : {0, 1, 3, 8192, 8193, 100'003, 3'000'017}) {
      const at::Tensor tensor = at::arange(count, at::kFloat) + rank.rank();
      group_of_all(*rank.world())->all_reduce(tensor, ReduceOp::kMax)->wait();
      EXPECT_TRUE(at::equal(tensor, at::arange(count, at::kFloat) + (rank.size() - 1))) << count;
    }
  });
}

TEST_P(Collectives, AllReduceGivesTheSameBitsOnEveryRank) {
  run([](Rank& rank) {
    for (const std::int64_t count : {1000, 100'003}) {
      const at::Tensor tensor = (at::arange(count, at::kFloat) * (rank.rank() + 0.1)).sin_();
      group_of_all(*rank.world())->all_reduce(tensor, ReduceOp::kSum)->wait();
      const at::Tensor all = at::empty({rank.size(), count});
      group_of_all(*rank.world())->all_gather(all, tensor)->wait();
      for (int i = 0; i < rank.size(); ++i) {
        EXPECT_TRUE(at::equal(all[i], tensor));
      }
    }
  });
}

TEST_P(Collectives, ReduceScatterGivesThisRanksPart) {
  run([](Rank& rank) {
    const int n = rank.size();
    for (const std::int64_t count : {0, 1, 7, 1000, 600'011}) {
      const at::Tensor input = at::arange(n * count, at::kLong) + rank.rank();
      const at::Tensor output = at::empty({count}, at::kLong);
      group_of_all(*rank.world())->reduce_scatter(output, input, ReduceOp::kSum)->wait();
      const at::Tensor own = at::arange(rank.rank() * count, (rank.rank() + 1) * count, at::kLong);
      EXPECT_TRUE(at::equal(output, own * n + n * (n - 1) / 2)) << count;
    }
    const at::Tensor average = at::empty({3});
    group_of_all(*rank.world())
        ->reduce_scatter(average, at::full({n, 3}, 1.0 + rank.rank()), ReduceOp::kAvg)
        ->wait();
    EXPECT_TRUE(at::equal(average, at::full({3}, (n + 1) / 2.0)));
  });
}

TEST_P(Collectives, SixteenBitSumsAreRoundedOnce) {
  run([](Rank& rank) {
    // In bf16, (256 + 1) + 1 is 256, because each addition is rounded, but 256 + (1 + 1) is 258.
    // The rank with 256 can be on another host than the other ranks.
    for (int large = 0; large < rank.size(); ++large) {
      const at::Tensor input =
          at::full({2 * rank.size()}, rank.rank() == large ? 256 : 1, at::kBFloat16);
      const at::Tensor output = at::empty({2}, at::kBFloat16), sum = input.narrow(0, 0, 2).clone();
      group_of_all(*rank.world())->reduce_scatter(output, input, ReduceOp::kSum)->wait();
      group_of_all(*rank.world())->all_reduce(sum, ReduceOp::kSum)->wait();
      const at::Tensor exact = at::full({2}, 256 + rank.size() - 1).to(at::kBFloat16);
      EXPECT_TRUE(at::equal(output, exact));
      EXPECT_TRUE(at::equal(sum, exact));
    }
  });
}

std::int64_t count_between(int from, int to, std::int64_t scale) {
  return scale * ((from + 2 * to) % 3);
}

TEST_P(Collectives, AllToAllWithUnevenCounts) {
  run([](Rank& rank) {
    for (const std::int64_t scale : {0, 1, 50, 500'000}) {
      std::vector<std::int64_t> sends;
      std::vector<std::int64_t> receives;
      std::vector<at::Tensor> input{at::empty({0})};
      std::vector<at::Tensor> expected{at::empty({0})};
      for (int peer = 0; peer < rank.size(); ++peer) {
        sends.push_back(count_between(rank.rank(), peer, scale));
        receives.push_back(count_between(peer, rank.rank(), scale));
        input.push_back(numbers_from(10 * rank.rank() + peer, sends.back()));
        expected.push_back(numbers_from(10 * peer + rank.rank(), receives.back()));
      }
      const at::Tensor output = at::empty_like(at::cat(expected));
      group_of_all(*rank.world())->all_to_all(output, at::cat(input), receives, sends)->wait();
      EXPECT_TRUE(at::equal(output, at::cat(expected))) << scale;
    }
  });
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  run([](Rank& rank) {
    for (int root = 0; root < rank.size(); ++root) {
      for (const std::int64_t count : {0, 5, 1'500'000}) {
        const at::Tensor tensor = numbers_from(rank.rank(), count);
        group_of_all(*rank.world())->broadcast(tensor, root)->wait();
        EXPECT_TRUE(at::equal(tensor, numbers_from(root, count)));
      }
    }
  });
}

TEST_P(Collectives, RunConcurrentlyEvenIfAWorkIsDropped) {
  run([](Rank& rank) {
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 5; ++i) {
      tensors.push_back(at::full({1000}, i, at::kLong));
      works.push_back(group_of_all(*rank.world())->all_reduce(tensors.back(), ReduceOp::kSum));
      group_of_all(*rank.world())->all_reduce(at::full({10}, 1.0), ReduceOp::kSum);
    }
    for (int i = 4; i >= 0; --i) {
      works[static_cast<std::size_t>(i)]->wait();
      EXPECT_EQ(tensors[static_cast<std::size_t>(i)][7].item<std::int64_t>(), i * rank.size());
    }
    group_of_all(*rank.world())->barrier();
  });
}

TEST_P(Collectives, ManyCallsStaySynchronized) {
  run([](Rank& rank) {
    const CommunicatorPtr group = group_of_all(*rank.world());
    std::mt19937 random(7);
    for (int i = 0; i < 300; ++i) {
      const auto count = static_cast<std::int64_t>(random() % 20'000);
      const at::Tensor sum = at::full({count}, i + rank.rank(), at::kLong);
      const at::Tensor all = at::empty({rank.size(), count}, at::kLong);
      const WorkPtr first = group->all_reduce(sum, ReduceOp::kMax);
      const WorkPtr second = group->all_gather(all, at::full({count}, i * rank.rank(), at::kLong));
      first->wait();
      second->wait();
      ASSERT_TRUE(at::equal(sum, at::full({count}, i + rank.size() - 1, at::kLong))) << i;
      for (int peer = 0; peer < rank.size(); ++peer) {
        ASSERT_TRUE(at::equal(all[peer], at::full({count}, i * peer, at::kLong))) << i;
      }
    }
  });
}

TEST_P(Collectives, CountTheirInputBytes) {
  run([](Rank& rank) {
    const int n = rank.size();
    group_of_all(*rank.world())->all_gather(at::empty({n * 3}), at::zeros({3}))->wait();
    group_of_all(*rank.world())
        ->reduce_scatter(at::empty({2}), at::zeros({n * 2}), ReduceOp::kSum)
        ->wait();
    const TrafficTable table = rank.world()->traffic().table();
    if (n == 1) {
      EXPECT_TRUE(table.empty());
      return;
    }
    EXPECT_EQ(table.at({"all", "all_gather"}).bytes, 12);
    EXPECT_EQ(table.at({"all", "reduce_scatter"}).bytes, n * 8);
    EXPECT_EQ(table.at({"all", "reduce_scatter"}).calls, 1);
  });
}

TEST_P(Collectives, RefuseInvalidArgumentsBeforeTheTransfer) {
  run([](Rank& rank) {
    const CommunicatorPtr group = group_of_all(*rank.world());
    const int n = rank.size();
    const auto reduce = [&](const at::Tensor& tensor, ReduceOp op) {
      return [=] { group->all_reduce(tensor, op); };
    };
    testing::expect_refusals(
        {{"sizes", [&] { group->all_gather(at::empty({n * 3 + 1}), at::empty({3})); }, {"3"}},
         {"types",
          [&] { group->all_gather(at::empty({n}), at::empty({1}, at::kInt)); },
          {"Float", "Int"}},
         {"parts",
          [&] { group->reduce_scatter(at::empty({2}), at::empty({n}), ReduceOp::kSum); },
          {"reduce_scatter"}},
         {"strides", reduce(at::empty({4, 4}).t(), ReduceOp::kSum), {"not contiguous"}},
         {"average", reduce(at::empty({2}, at::kInt), ReduceOp::kAvg), {"avg of Int"}},
         {"bools", reduce(at::empty({2}, at::kBool), ReduceOp::kSum), {"sum of Bool"}},
         {"root", [&] { group->broadcast(at::empty({2}), n); }, {"outside the group"}},
         {"undefined", reduce(at::Tensor(), ReduceOp::kSum), {"undefined"}}});
    group->barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(OnBackends, Collectives,
                         ::testing::Values(BackendCase{"shm", "a"}, BackendCase{"shm", "aa"},
                                           BackendCase{"shm", "aaa"}, BackendCase{"shm", "aaaa"},
                                           BackendCase{"gloo", "aa"}, BackendCase{"gloo", "aaa"},
                                           BackendCase{"gloo", "aaaa"}, BackendCase{"gloo", "abab"},
                                           BackendCase{"gloo", "aab"}),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace tessera::comm
