#include "fsdp/buffers.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace tessera::fsdp {
namespace {

/// Rank `rank`'s part by torch.chunk, flat and padded with zeros to `room`.
at::Tensor padded_chunk(const at::Tensor& whole, std::int64_t ranks, std::int64_t rank,
                        std::int64_t dim, std::int64_t room) {
  const std::vector<at::Tensor> chunks = whole.chunk(ranks, dim);
  at::Tensor flat = at::zeros({room}, whole.options());
  if (rank < static_cast<std::int64_t>(chunks.size())) {
    const at::Tensor chunk = chunks[static_cast<std::size_t>(rank)].reshape({-1});
    flat.narrow(0, 0, chunk.numel()).copy_(chunk);
  }
  return flat;
}

struct Case {
  std::vector<std::int64_t> sizes;
  std::int64_t ranks;
  std::int64_t dim;
};

class Packing : public ::testing::TestWithParam<Case> {};

TEST_P(Packing, PutsEachRanksChunkIntoItsRow) {
  const auto& [sizes, ranks, dim] = GetParam();
  const at::Tensor whole = at::arange(c10::multiply_integers(sizes), at::kFloat).add(1).view(sizes);
  const std::vector<Segment> segments{{{sizes, dim, ranks}, 0}};
  at::Tensor buffer = at::full({ranks, flat_numel(segments)}, -1.0);
  pack({whole}, segments, buffer);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    EXPECT_TRUE(buffer[rank].equal(padded_chunk(whole, ranks, rank, dim, buffer.size(1)))) << rank;
  }
}

TEST_P(Packing, UnpacksWhatWasPacked) {
  const auto& [sizes, ranks, dim] = GetParam();
  const at::Tensor whole = at::arange(c10::multiply_integers(sizes), at::kFloat).view(sizes);
  const ShardShape first{{3, 2}, 0, ranks};
  const std::vector<Segment> segments{{first, 0}, {{sizes, dim, ranks}, first.padded_numel()}};
  at::Tensor buffer = at::empty({ranks, flat_numel(segments)});
  pack({at::zeros({3, 2}), whole}, segments, buffer);
  const at::Tensor back = at::full(sizes, -1.0);
  unpack(buffer, segments, {at::zeros({3, 2}), back});
  EXPECT_TRUE(back.equal(whole));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Packing,
                         ::testing::Values(Case{{8, 3}, 4, 0}, Case{{7, 3}, 4, 0}, Case{{5}, 4, 0},
                                           Case{{2, 2}, 4, 0}, Case{{1}, 3, 0}, Case{{0, 4}, 2, 0},
                                           Case{{6, 5}, 1, 0}, Case{{3, 8}, 4, 1},
                                           Case{{3, 7}, 4, 1}, Case{{2, 5, 3}, 3, 2},
                                           Case{{4, 1, 2}, 2, 1}));

TEST(Packing, TakesTensorsOfAnyStrides) {
  const at::Tensor whole = at::arange(15, at::kFloat).view({3, 5}).t();
  const std::vector<Segment> segments{{{{5, 3}, 0, 2}, 0}};
  at::Tensor buffer = at::empty({2, flat_numel(segments)});
  pack({whole}, segments, buffer);
  EXPECT_TRUE(buffer[1].equal(padded_chunk(whole, 2, 1, 0, 9)));
}

TEST(Packing, WritesZerosForAMissingTensor) {
  const std::vector<Segment> segments{{{{4}, 0, 2}, 0}};
  at::Tensor buffer = at::full({2, 2}, 7.0);
  pack({at::Tensor()}, segments, buffer);
  EXPECT_TRUE(buffer.equal(at::zeros({2, 2})));
}

TEST(Packing, ClearsGapsBetweenSegmentsAndAfterThem) {
  const std::vector<Segment> segments = segments_of({{{6}, 0, 2}, {{2}, 0, 2}}, at::kFloat);
  at::Tensor buffer = at::full({2, flat_numel(segments)}, 7.0);
  pack({at::ones({6}), at::Tensor()}, segments, buffer);
  // 3 elements and 1, each from a multiple of 16 on.
  const at::Tensor row = at::arange(16 + 16).lt(3).to(at::kFloat);
  EXPECT_TRUE(buffer.equal(at::stack({row, row})));
}

TEST(Packing, CastsToTheTypeOfTheBuffer) {
  const std::vector<Segment> segments{{{{4}, 0, 2}, 0}};
  at::Tensor buffer = at::empty({2, 2});
  pack({at::arange(4, at::kBFloat16)}, segments, buffer);
  EXPECT_TRUE(buffer.equal(at::arange(4, at::kFloat).view({2, 2})));
}

}  // namespace
}  // namespace tessera::fsdp
