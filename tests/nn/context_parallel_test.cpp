// Attention over a split sequence. The oracle is attention of one rank, in fp64.
#include "tessera/nn/context_parallel.h"
#include "tessera/nn/attention.h"

#include <c10/core/InferenceMode.h>

#include <cmath>
#include <limits>

#include "tessera/comm/trace.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/causal_attention.h"
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
    EXPECT_EQUAL(std::get<0>(at::cat(positions).sort()), at::arange(kTokens));
  }
}

TEST_ON_RANKS(ContextParallel, HasAChunkOfTheHeadAndOneOfTheTail, 3) {
  const at::Tensor expected = rank.rank() == 1   ? at::tensor({2, 3, 8, 9})
                              : rank.rank() == 0 ? at::tensor({0, 1, 10, 11})
                                                 : at::tensor({4, 5, 6, 7});
  EXPECT_EQUAL(split_over(rank)->positions(12, at::kCPU), expected.to(at::kLong));
}

TEST_ON_RANKS(ContextParallel, PutsTogetherWhatItSplits, 3) {
  const ContextParallelPtr split = split_over(rank);
  const at::Tensor whole = testing::values({2, 12, 3}).requires_grad_();
  const at::Tensor part = split->shard(whole, -2);
  EXPECT_EQUAL(part, whole.index_select(1, split->positions(12, at::kCPU)));
  const at::Tensor again = split->unshard(part, 1);
  EXPECT_EQUAL(again, whole);
  const at::Tensor tokens = at::arange(24).view({12, 2});
  EXPECT_EQUAL(split->unshard(split->shard(tokens, 0), 0), tokens);
  // Each of the three has used the whole.
  const at::Tensor weights = testing::values({2, 12, 3}, 5);
  (again * weights * (rank.rank() + 1)).sum().backward();
  EXPECT_CLOSE(split->shard(whole.grad(), 1), split->shard(weights * 6, 1), 1e-12, 1e-12);
}

struct SplitAttention {
  std::int64_t kv_heads;
  ContextAttentionOptions options{};
  bool masked = false;  ///< by one that hides what no causal mask does
  std::int64_t batch = 2, width = 4;
  at::ScalarType type = at::kDouble;
  /// The lengths of the documents of each sequence, one sequence after another; none: no documents.
  std::vector<std::int64_t> documents{};
};

/// (batch, tokens): the position of each token in its document.
at::Tensor document_positions(const SplitAttention& c, std::int64_t tokens) {
  std::vector<at::Tensor> of_documents;
  for (const std::int64_t length : c.documents) {
    of_documents.push_back(at::arange(length));
  }
  return at::cat(of_documents).view({c.batch, tokens});
}

/// Which keys the queries of one rank see: (tokens, tokens) or as the mask.
at::Tensor seen_keys(const SplitAttention& c, const at::Tensor& mask, std::int64_t tokens) {
  if (c.masked) {
    return mask;
  }
  const at::Tensor keys = at::arange(tokens), back = keys.unsqueeze(1) - keys;
  const std::int64_t window = c.options.window > 0 ? c.options.window : tokens;
  if (!c.options.causal) {
    return at::ones({tokens, tokens}, at::kBool);
  }
  const at::Tensor near = back.ge(0).logical_and(back.lt(window));
  return c.documents.empty()
             ? near
             : near.logical_and(document_positions(c, tokens).unsqueeze(2).ge(back)).unsqueeze(1);
}

/// By formula.
at::Tensor attention_of_one_rank(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& seen) {
  const std::int64_t group = q.size(1) / k.size(1);
  const at::Tensor scores = q.matmul(k.repeat_interleave(group, 1).transpose(2, 3)) /
                            std::sqrt(static_cast<double>(q.size(3)));
  return scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity())
      .softmax(-1)
      .matmul(v.repeat_interleave(group, 1));
}

class AttentionOfSplitSequences : public ::testing::TestWithParam<SplitAttention> {};

TEST_P(AttentionOfSplitSequences, IsThatOfOneRank) {
  constexpr std::int64_t kHeads = 6, kTokens = 24;
  const SplitAttention& c = GetParam();
  // Numbers of the type, in fp64.
  const auto drawn = [&](std::int64_t heads, int seed) {
    const at::Tensor numbers = testing::values({c.batch, heads, kTokens, c.width}, seed);
    return numbers.to(c.type).to(at::kDouble).requires_grad_();
  };
  const at::Tensor q = drawn(kHeads, 0), k = drawn(c.kv_heads, 1), v = drawn(c.kv_heads, 2);
  const at::Tensor weights = testing::values(q.sizes(), 3).to(c.type).to(at::kDouble);
  const at::Tensor mask = testing::values({c.batch, 1, kTokens, kTokens}, 4) > -0.2;
  const at::Tensor expected = attention_of_one_rank(q, k, v, seen_keys(c, mask, kTokens));
  (expected * weights).sum().backward();
  const double error = c.type == at::kDouble ? 1e-10 : (c.type == at::kFloat ? 1e-5 : 3e-2);
  for (const int ranks : {1, 2, 3, 4}) {
    RunRanks(ranks, [&](Rank& rank) {
      const StrictScope strict;
      const ContextParallelPtr split = split_over(rank);
      std::vector<at::Tensor> own;
      for (const at::Tensor& whole : {q, k, v}) {
        own.push_back(split->shard(whole.detach(), 2).to(c.type).requires_grad_());
      }
      ContextAttentionOptions options = c.options;
      if (c.masked) {
        options.mask = split->shard(mask, 2);
      }
      if (!c.documents.empty()) {
        options.documents =
            std::make_shared<const Documents>(document_positions(c, kTokens), at::kCPU);
      }
      const at::Tensor y = split->attention(own[0], own[1], own[2], options);
      EXPECT_EQ(y.scalar_type(), c.type);
      EXPECT_CLOSE(y.to(at::kDouble), split->shard(expected, 2), error, error);
      (y * split->shard(weights, 2).to(c.type)).sum().backward();
      std::size_t i = 0;
      for (const at::Tensor& whole : {q, k, v}) {
        const at::Tensor gradient = own[i++].grad().to(at::kDouble);
        EXPECT_CLOSE(gradient, split->shard(whole.grad(), 2), error, error) << i << " on " << ranks;
      }
    });
  }
}

// Chunks of 12, 6, 4 and 3 tokens: windows that are shorter, as long, and longer by one and more.
INSTANTIATE_TEST_SUITE_P(
    , AttentionOfSplitSequences,
    ::testing::Values(SplitAttention{6}, SplitAttention{2}, SplitAttention{3, {.window = 2}},
                      SplitAttention{1, {.window = 1}}, SplitAttention{2, {.window = 4}},
                      SplitAttention{2, {.window = 6}}, SplitAttention{3, {.window = 7}},
                      SplitAttention{2, {.window = 11}}, SplitAttention{2, {.window = 13}},
                      SplitAttention{6, {.window = 23}}, SplitAttention{6, {.window = 24}},
                      SplitAttention{1, {.causal = false}}, SplitAttention{2, {}, true},
                      SplitAttention{2, {}, false, 1, 24, at::kFloat},
                      SplitAttention{6, {}, false, 1, 3, at::kFloat},
                      SplitAttention{1, {.window = 7}, false, 3, 24, at::kFloat},
                      SplitAttention{2, {}, false, 1, 24, at::kBFloat16},
                      SplitAttention{3, {.window = 9}, false, 1, 16, at::kBFloat16}));

// Documents that end with a chunk, within one and after several, of one token and of a sequence.
INSTANTIATE_TEST_SUITE_P(
    OfDocuments, AttentionOfSplitSequences,
    ::testing::Values(
        SplitAttention{6, {}, false, 2, 4, at::kDouble, {7, 17, 24}},
        SplitAttention{2, {}, false, 2, 4, at::kDouble, {24, 24}},
        SplitAttention{1, {}, false, 2, 4, at::kDouble, {1, 1, 22, 12, 12}},
        SplitAttention{3, {.window = 5}, false, 2, 4, at::kDouble, {3, 20, 1, 2, 9, 13}},
        SplitAttention{2, {.window = 13}, false, 1, 8, at::kFloat, {23, 1}},
        SplitAttention{2, {}, false, 3, 16, at::kBFloat16, {6, 6, 6, 6, 5, 14, 5, 24}}));

TEST_ON_RANKS(ContextParallel, SendsKeysAndValuesAtOnceAndTheirGradientsBack, 2) {
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
}

TEST_ON_MESH(ContextParallel, SplitsHeadsOfTensorParallelismToo, {2, 2}, {"cp", "tp"}) {
  const at::Tensor q = testing::values({2, 4, 12, 8}).requires_grad_();
  const at::Tensor kv = testing::values({2, 2, 12, 8}, 1).requires_grad_();
  const at::Tensor causal = detail::causal_mask(12, 0, at::kCPU);
  const at::Tensor expected = attention_of_one_rank(q, kv, kv * 2, causal);
  expected.square().sum().backward();
  ContextParallel split(mesh["cp"]);
  const auto of_heads = [&](const at::Tensor& whole) {
    const at::Tensor own = split.shard(whole.detach(), 2);
    return at::Tensor(distribute_tensor(own, mesh["tp"], {Shard{1}})).detach().requires_grad_();
  };
  const at::Tensor own_q = of_heads(q), own_kv = of_heads(kv);
  const at::Tensor y = split.attention(own_q, own_kv, own_kv * 2);
  EXPECT_CLOSE(y, split.shard(expected, 2), 1e-10, 1e-12);
  y.square().sum().backward();
  for (const auto& [own, whole] : {std::pair(own_q, q), std::pair(own_kv, kv)}) {
    EXPECT_CLOSE(own.grad(), split.shard(whole.grad(), 2), 1e-10, 1e-12);
  }
}

TEST_ON_RANKS(ContextParallel, TrainsAsItEvaluates, 2) {
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
  EXPECT_EQUAL(y.detach(), evaluated);
  y.sum().backward();
  EXPECT_TRUE(own.grad().defined());
}

TEST_ON_RANKS(ContextParallel, RefusesWhatItCannotSplit, 3) {
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
  const at::Tensor none = at::ones({1, 0, 4, 8});
  EXPECT_ERROR(split->attention(q, none, none), "keys of [1, 0, 4, 8]", "heads that divide them");
  EXPECT_ERROR(split->attention(q, q, q, {.window = -2}), "window of -2");
  EXPECT_ERROR(split->attention(q, q, q.to(at::kDouble)), "in Float", "in Double", "equal");
  EXPECT_ERROR(split->attention(q, q, q, {.causal = false, .window = 2}), "window of 2",
               "not causal", "pass a mask");
  const auto documents = [](std::vector<std::int64_t> positions) {
    const std::int64_t tokens = std::ssize(positions);
    return std::make_shared<const Documents>(at::tensor(positions).view({1, tokens}), at::kCPU);
  };
  EXPECT_ERROR(split->attention(q, q, q, {.documents = documents({0, 1, 2, 0})}),
               "1 sequences of 12 tokens", "documents of 1 sequences of 4");
  const DocumentsPtr two = documents({0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_ERROR(split->attention(q, q, q, {.causal = false, .documents = two}), "not causal",
               "one mask that says both");
  EXPECT_ERROR(split->attention(q, q, q, {.mask = at::ones({4, 12}, at::kBool), .documents = two}),
               "documents and a mask");
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
