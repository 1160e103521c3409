// Tests flat buffers of parameter groups: offsets, dtypes, packing, and the memory pool. No ranks
// are needed.
#include "fsdp/buffers.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "fsdp/recording_streams.h"
#include "tessera/comm/world.h"

namespace tessera::fsdp::buffers {

using comm::Lane;
using Log = std::vector<std::string>;

FlatBufferLayout layout_of(const std::vector<ShardShape>& shapes,
                           const MixedPrecisionPolicy& policy = {}) {
  return {shapes, at::kFloat, policy, {c10::kCPU}, c10::kCPU};
}

TEST(FlatBufferLayout, AlignsPaddedShards) {
  // On 3 ranks, 5 rows are split into 2, 2 and 1 rows, and 4 columns into 2, 2 and 0 columns.
  const FlatBufferLayout layout =
      layout_of({{{5, 3}, 0, 3}, {{2, 4}, 1, 3}, {{}, std::nullopt, 3}});
  ASSERT_EQ(layout.segments().size(), 3u);
  EXPECT_EQ(layout.segments()[0].offset, 0);
  EXPECT_EQ(layout.segments()[1].offset, 16);
  EXPECT_EQ(layout.segments()[2].offset, 16 + 16);
  EXPECT_EQ(flat_numel(layout.segments()), 16 + 16 + 16);
  EXPECT_EQ(layout.ranks(), 3);
  EXPECT_FALSE(layout.splits_rows());
  EXPECT_TRUE(layout_of({{{5, 3}, 0, 3}, {{2}, 0, 3}}).splits_rows());
}

TEST(FlatBufferLayout, AlignsForTheNarrowerDtype) {
  const FlatBufferLayout layout =
      layout_of({{{12}, 0, 2}, {{12}, 0, 2}}, {.param_dtype = at::kBFloat16});
  EXPECT_EQ(layout.segments()[1].offset, 32);
  EXPECT_EQ(flat_numel(layout.segments()), 64);
}

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

TEST(Packing, ZeroesGapsBetweenAndAfterSegments) {
  const std::vector<Segment> segments = segments_of({{{6}, 0, 2}, {{2}, 0, 2}}, at::kFloat);
  at::Tensor buffer = at::full({2, flat_numel(segments)}, 7.0);
  pack({at::ones({6}), at::Tensor()}, segments, buffer);
  const at::Tensor row = at::arange(16 + 16).lt(3).to(at::kFloat);
  EXPECT_TRUE(buffer.equal(at::stack({row, row})));
}

TEST(Packing, PacksAndUnpacksTheChunkOfEachRank) {
  struct Case {
    std::vector<std::int64_t> sizes;
    std::int64_t ranks, dim;
  };
  const Case cases[] = {{{8, 3}, 4, 0}, {{7, 3}, 4, 0},    {{5}, 4, 0},      {{2, 2}, 4, 0},
                        {{1}, 3, 0},    {{0, 4}, 2, 0},    {{6, 5}, 1, 0},   {{3, 8}, 4, 1},
                        {{3, 7}, 4, 1}, {{2, 5, 3}, 3, 2}, {{4, 1, 2}, 2, 1}};
  for (const auto& [sizes, ranks, dim] : cases) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    const at::Tensor whole =
        at::arange(c10::multiply_integers(sizes), at::kFloat).add(1).view(sizes);
    const ShardShape first{{3, 2}, 0, ranks};
    const std::vector<Segment> segments{{first, 0}, {{sizes, dim, ranks}, first.padded_numel()}};
    at::Tensor buffer = at::full({ranks, flat_numel(segments)}, -1.0);
    pack({at::zeros({3, 2}), whole}, segments, buffer);
    const std::int64_t room = buffer.size(1) - first.padded_numel();
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      EXPECT_TRUE(buffer[rank]
                      .narrow(0, first.padded_numel(), room)
                      .equal(padded_chunk(whole, ranks, rank, dim, room)));
    }
    const at::Tensor back = at::full(sizes, -1.0);
    unpack(buffer, segments, {at::zeros({3, 2}), back});
    EXPECT_TRUE(back.equal(whole));
  }
}

TEST(Packing, CastsTransposedTensors) {
  const at::Tensor whole = at::arange(15, at::kBFloat16).view({3, 5}).t();
  const std::vector<Segment> segments{{{{5, 3}, 0, 2}, 0}};
  at::Tensor buffer = at::empty({2, flat_numel(segments)});
  pack({whole}, segments, buffer);
  EXPECT_TRUE(buffer[1].equal(padded_chunk(whole.to(at::kFloat), 2, 1, 0, 9)));
}

struct Pool {
  std::shared_ptr<RecordingStreams> streams = std::make_shared<RecordingStreams>();
  BufferPool pool{streams, at::kCPU};
};

TEST(BufferPool, ReusesMemoryWithinALaneAfterTheEvent) {
  Pool p;
  BufferPool::Buffer first = p.pool.acquire(100, at::kFloat, Lane::kAllGather);
  EXPECT_EQ(first.tensor.sizes(), at::IntArrayRef({100}));
  EXPECT_TRUE(p.streams->log().empty());
  const void* memory = first.tensor.data_ptr();
  p.pool.release(std::move(first), p.streams->record(Lane::kCompute));
  EXPECT_NE(p.pool.acquire(100, at::kFloat, Lane::kCompute).tensor.data_ptr(), memory);
  const BufferPool::Buffer second = p.pool.acquire(160, at::kHalf, Lane::kAllGather);
  EXPECT_EQ(second.tensor.scalar_type(), at::kHalf);
  EXPECT_EQ(second.tensor.data_ptr(), memory);
  EXPECT_EQ(p.streams->log(), (Log{"compute: record 1", "all_gather: wait 1"}));
}

TEST(BufferPool, FreesUnsuitableBuffersBeforeAllocation) {
  // An idle buffer of 100 elements is too small for 101 elements, and too large for 10 elements.
  for (const std::int64_t numel : {101, 10}) {
    Pool p;
    p.pool.release(p.pool.acquire(100, at::kFloat, Lane::kAllGather),
                   p.streams->record(Lane::kCompute));
    EXPECT_EQ(p.pool.idle_bytes(), 400);
    const BufferPool::Buffer buffer = p.pool.acquire(numel, at::kFloat, Lane::kAllGather);
    EXPECT_EQ(p.pool.idle_bytes(), 0);
    // The pool frees the idle buffer only after the event that was passed to release().
    EXPECT_EQ(p.streams->log(), (Log{"compute: record 1", "all_gather: wait 1"}));
  }
}

TEST(BufferPool, TakesTheSmallestBufferThatFits) {
  Pool p;
  BufferPool::Buffer large = p.pool.acquire(150, at::kFloat, Lane::kCompute);
  BufferPool::Buffer small = p.pool.acquire(100, at::kFloat, Lane::kCompute);
  const void* memory = small.tensor.data_ptr();
  p.pool.release(std::move(large), nullptr);
  p.pool.release(std::move(small), nullptr);
  EXPECT_EQ(p.pool.acquire(90, at::kFloat, Lane::kCompute).tensor.data_ptr(), memory);
}

TEST(BufferPool, IsEmptyAfterClear) {
  Pool p;
  p.pool.release(p.pool.acquire(100, at::kFloat, Lane::kCompute),
                 p.streams->record(Lane::kReduceScatter));
  p.pool.clear();
  EXPECT_EQ(p.pool.idle_bytes(), 0);
  EXPECT_EQ(p.streams->log(), (Log{"reduce_scatter: record 1", "compute: wait 1"}));
}

}  // namespace tessera::fsdp::buffers
