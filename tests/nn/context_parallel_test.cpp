// Attention over a split sequence. The oracle is attention of one rank, in fp64.
#include "tessera/nn/context_parallel.h"

#include <c10/core/InferenceMode.h>

#include "tessera/comm/trace.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/attention_kernel.h"
#include "tessera/nn/initialization.h"
#include "testing/distributed.h"

namespace tessera::nn {
namespace {

ContextParallelPtr split_over(const Rank& rank) {
  return std::make_shared<ContextParallel>(rank.mesh({rank.size()}, {"cp"}));
}

TEST(ContextParallel, GivesEveryRankAsManyPairsOfQueryAndKey) {
  constexpr std::int64_t kTokens = 48;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    std::vector<at::Tensor> positions(static_cast<std::size_t>(ranks));
    RunRanks(ranks, [&](Rank& rank) {
      positions[static_cast<std::size_t>(rank.rank())] =
          split_over(rank)->positions(kTokens, at::kCPU);
    });
    for (const at::Tensor& own : positions) {
      // The query at position p sees p + 1 keys.
      EXPECT_EQ((own + 1).sum().item<std::int64_t>() * ranks, kTokens * (kTokens + 1) / 2);
    }
    EXPECT_TRUE(at::equal(std::get<0>(at::cat(positions).sort()), at::arange(kTokens)));
  }
}

TEST(ContextParallel, HasAChunkOfTheHeadAndOneOfTheTail) {
  RunRanks(3, [](Rank& rank) {
    const at::Tensor expected = rank.rank() == 1   ? at::tensor({2, 3, 8, 9})
                                : rank.rank() == 0 ? at::tensor({0, 1, 10, 11})
                                                   : at::tensor({4, 5, 6, 7});
    EXPECT_TRUE(at::equal(split_over(rank)->positions(12, at::kCPU), expected.to(at::kLong)));
  });
}

TEST(ContextParallel, PutsTogetherWhatItSplits) {
  RunRanks(3, [](Rank& rank) {
    const ContextParallelPtr split = split_over(rank);
    const at::Tensor whole = testing::values({2, 12, 3}).requires_grad_();
    const at::Tensor part = split->shard(whole, -2);
    EXPECT_TRUE(at::equal(part, whole.index_select(1, split->positions(12, at::kCPU))));
    const at::Tensor again = split->unshard(part, 1);
    EXPECT_TRUE(at::equal(again, whole));
    const at::Tensor tokens = at::arange(24).view({12, 2});
    EXPECT_TRUE(at::equal(split->unshard(split->shard(tokens, 0), 0), tokens));
    // Each of the three has used the whole.
    const at::Tensor weights = testing::values({2, 12, 3}, 5);
    (again * weights * (rank.rank() + 1)).sum().backward();
    EXPECT_TRUE(split->shard(whole.grad(), 1).allclose(split->shard(weights * 6, 1), 1e-12, 1e-12));
  });
}

struct SplitAttention {
  std::int64_t kv_heads;
  ContextAttentionOptions options{};
  bool masked = false;  ///< by one that hides what no causal mask does
};

class AttentionOfSplitSequences : public ::testing::TestWithParam<SplitAttention> {};

TEST_P(AttentionOfSplitSequences, IsThatOfOneRank) {
  constexpr std::int64_t kBatch = 2, kHeads = 6, kTokens = 24, kWidth = 4;
  const SplitAttention& c = GetParam();
  const at::Tensor q = testing::values({kBatch, kHeads, kTokens, kWidth}).requires_grad_();
  const at::Tensor k = testing::values({kBatch, c.kv_heads, kTokens, kWidth}, 1).requires_grad_();
  const at::Tensor v = testing::values({kBatch, c.kv_heads, kTokens, kWidth}, 2).requires_grad_();
  const at::Tensor weights = testing::values(q.sizes(), 3);
  const at::Tensor mask = testing::values({kBatch, 1, kTokens, kTokens}, 4) > -0.2;
  const at::Tensor seen = c.masked               ? mask
                          : c.options.window > 0 ? causal_mask(kTokens, c.options.window, at::kCPU)
                                                 : at::Tensor();
  const at::Tensor expected = attention(q, k, v, c.options.causal && !seen.defined(), seen);
  (expected * weights).sum().backward();
  for (const int ranks : {1, 2, 3, 4}) {
    RunRanks(ranks, [&](Rank& rank) {
      const StrictScope strict;
      const ContextParallelPtr split = split_over(rank);
      std::vector<at::Tensor> own;
      for (const at::Tensor& whole : {q, k, v}) {
        own.push_back(split->shard(whole.detach(), 2).requires_grad_());
      }
      ContextAttentionOptions options = c.options;
      if (c.masked) {
        options.mask = split->shard(mask, 2);
      }
      for (int step = 0; step < 2; ++step) {  // the second with the masks of the first
        const at::Tensor y = split->attention(own[0], own[1], own[2], options);
        EXPECT_TRUE(y.allclose(split->shard(expected, 2), 1e-10, 1e-12));
        (y * split->shard(weights, 2)).sum().backward();
      }
      std::size_t i = 0;
      for (const at::Tensor& whole : {q, k, v}) {
        EXPECT_TRUE(own[i++].grad().allclose(2 * split->shard(whole.grad(), 2), 1e-10, 1e-12))
            << i << " on " << ranks;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(, AttentionOfSplitSequences,
                         ::testing::Values(SplitAttention{6}, SplitAttention{2},
                                           SplitAttention{3, {.window = 2}},
                                           SplitAttention{2, {.window = 11}},
                                           SplitAttention{1, {.causal = false}},
                                           SplitAttention{2, {}, true}));

TEST(ContextParallel, SendsKeysAndValuesAtOnceAndTheirGradientsBack) {
  RunRanks(2, [](Rank& rank) {
    const ContextParallelPtr split = split_over(rank);
    const at::Tensor q = at::ones({1, 4, 6, 8}).requires_grad_();
    const at::Tensor kv = at::ones({1, 2, 6, 8}).requires_grad_();
    const auto before = rank.world()->traffic().table();
    const comm::CallRecorder recorder(rank.world()->traffic());
    split->attention(q, kv, kv * 2).sum().backward();
    const auto sent = rank.world()->traffic().since(before);
    const std::int64_t bytes = 2 * kv.numel() * 4;
    EXPECT_EQ(sent.size(), 2U);
    EXPECT_EQ(sent.at({"cp", "all_gather"}).calls, 1);
    EXPECT_EQ(sent.at({"cp", "all_gather"}).bytes, bytes);
    EXPECT_EQ(sent.at({"cp", "reduce_scatter"}).calls, 1);
    EXPECT_EQ(sent.at({"cp", "reduce_scatter"}).bytes, 2 * bytes);
    const auto calls = recorder.calls();
    EXPECT_EQ(calls.at(0).purpose, "keys and values");
    EXPECT_EQ(calls.at(1).purpose, "keys and values");
  });
}

TEST(ContextParallel, TrainsWithTheMasksOfAnEvaluation) {
  RunRanks(2, [](Rank& rank) {
    const ContextParallelPtr split = split_over(rank);
    const auto whole = testing::values({1, 2, 12, 4});
    const auto attend = [&](const at::Tensor& own) {
      return split->attention(own, own, own, {.window = 4});
    };
    at::Tensor evaluated;
    {
      const c10::InferenceMode inference;
      evaluated = attend(split->shard(whole, 2));
    }
    const at::Tensor own = split->shard(whole, 2).requires_grad_();
    const at::Tensor y = attend(own);
    EXPECT_TRUE(at::equal(y.detach(), evaluated));
    y.sum().backward();
    EXPECT_TRUE(own.grad().defined());
  });
}

TEST(ContextParallel, RefusesWhatItCannotSplit) {
  RunRanks(3, [](Rank& rank) {
    const ContextParallelPtr split = split_over(rank);
    EXPECT_ERROR(split->positions(10, at::kCPU), "10 tokens", "3 context-parallel ranks",
                 "multiple of 6");
    EXPECT_ERROR(split->shard(at::ones({2, 9}), 1), "9 tokens", "multiple of 6");
    EXPECT_ERROR(split->unshard(at::ones({2, 3}), 1), "9 tokens", "multiple of 6");
    EXPECT_ERROR(split->shard(at::ones({2, 6}), 2), "dimension 2", "[2, 6]");
    EXPECT_ERROR(ContextParallel(rank.mesh({3, 1}, {"a", "b"})), "mesh[\"cp\"]");
    const at::Tensor q = at::ones({1, 2, 4, 8}), odd = at::ones({1, 2, 3, 8});
    EXPECT_ERROR(split->attention(odd, odd, odd), "3 tokens", "shard()");
    EXPECT_ERROR(split->attention(q, odd, odd), "[1, 2, 4, 8]", "[1, 2, 3, 8]");
    EXPECT_ERROR(split->attention(q, q, q.slice(3, 4)), "values of [1, 2, 4, 4]");
    EXPECT_ERROR(split->attention(q, q, q.to(at::kDouble)), "in Float", "in Double", "equal");
    EXPECT_ERROR(split->attention(q, q, q, {.causal = false, .window = 2}), "window of 2",
                 "not causal", "pass a mask");
    const DeviceMesh mesh = rank.mesh({3}, {"cp"});
    const at::Tensor whole = distribute_tensor(q, mesh, {Replicate{}});
    EXPECT_ERROR(split->attention(whole, q, q), "plain", "split by batch and heads alone");
    const at::Tensor tokens = distribute_tensor(q, mesh, {Shard{2}});
    EXPECT_ERROR(split->attention(tokens, tokens, tokens), "split by batch and heads alone");
    // What each rank would drop is not what one rank drops.
    Attention block({.hidden = 4, .heads = 2, .dropout = 0.5});
    init_weights(block, 0);
    EXPECT_ERROR(block(at::ones({1, 4, 4}), AttentionInputs{.context_parallel = split}),
                 "dropout of 0.5", "split");
    block.eval();
    EXPECT_EQ(block(at::ones({1, 4, 4}), AttentionInputs{.context_parallel = split}).size(1), 4);
  });
}

TEST(ContextParallel, EndsOnAllRanksWhereOneHasOtherTokens) {
  const std::vector<std::string> errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const at::Tensor q = at::ones({1, 2, rank.rank() == 0 ? 4 : 3, 8});
    split_over(rank)->attention(q, q, q);
  });
  EXPECT_CONTAINS(errors[1], "3 tokens");
  EXPECT_NE(errors[0], "");
}

}  // namespace
}  // namespace tessera::nn
