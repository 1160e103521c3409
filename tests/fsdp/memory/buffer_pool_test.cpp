#include "fsdp/buffers.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "fsdp/streams/recording_streams.h"
#include "tessera/comm/world.h"

namespace tessera::fsdp {
namespace {

using comm::Lane;
using testing::RecordingStreams;
using Log = std::vector<std::string>;

struct Pool {
  std::shared_ptr<RecordingStreams> streams = std::make_shared<RecordingStreams>();
  BufferPool pool{streams, at::kCPU};
};

TEST(BufferPool, ReturnsBuffersOfTheRequestedSize) {
  Pool p;
  const BufferPool::Buffer buffer = p.pool.acquire(6, at::kHalf, Lane::kAllGather);
  EXPECT_EQ(buffer.tensor.sizes(), at::IntArrayRef({6}));
  EXPECT_EQ(buffer.tensor.scalar_type(), at::kHalf);
  EXPECT_TRUE(p.streams->log().empty());
}

TEST(BufferPool, WaitsForTheEventBeforeItReuses) {
  Pool p;
  BufferPool::Buffer first = p.pool.acquire(100, at::kFloat, Lane::kAllGather);
  const void* memory = first.tensor.data_ptr();
  p.pool.release(std::move(first), p.streams->record(Lane::kCompute));
  const BufferPool::Buffer second = p.pool.acquire(80, at::kFloat, Lane::kAllGather);
  EXPECT_EQ(second.tensor.data_ptr(), memory);
  EXPECT_EQ(p.streams->log(), (Log{"compute: record 1", "all_gather: wait 1"}));
}

TEST(BufferPool, KeepsLanesApart) {
  Pool p;
  BufferPool::Buffer first = p.pool.acquire(100, at::kFloat, Lane::kAllGather);
  const void* memory = first.tensor.data_ptr();
  p.pool.release(std::move(first), nullptr);
  EXPECT_NE(p.pool.acquire(100, at::kFloat, Lane::kCompute).tensor.data_ptr(), memory);
}

TEST(BufferPool, FreesWhatDoesNotFitBeforeItAllocates) {
  Pool p;
  p.pool.release(p.pool.acquire(100, at::kFloat, Lane::kAllGather),
                 p.streams->record(Lane::kCompute));
  EXPECT_EQ(p.pool.idle_bytes(), 400);
  const BufferPool::Buffer larger = p.pool.acquire(101, at::kFloat, Lane::kAllGather);
  EXPECT_EQ(p.pool.idle_bytes(), 0);
  // The lane whose memory it is waits before it goes back to the allocator.
  EXPECT_EQ(p.streams->log(), (Log{"compute: record 1", "all_gather: wait 1"}));
}

TEST(BufferPool, DoesNotWasteALargeBufferOnASmallRequest) {
  Pool p;
  p.pool.release(p.pool.acquire(100, at::kFloat, Lane::kCompute), nullptr);
  p.pool.acquire(10, at::kFloat, Lane::kCompute);
  EXPECT_EQ(p.pool.idle_bytes(), 0);
}

TEST(BufferPool, TakesTheSmallestThatFits) {
  Pool p;
  BufferPool::Buffer large = p.pool.acquire(150, at::kFloat, Lane::kCompute);
  BufferPool::Buffer small = p.pool.acquire(100, at::kFloat, Lane::kCompute);
  const void* memory = small.tensor.data_ptr();
  p.pool.release(std::move(large), nullptr);
  p.pool.release(std::move(small), nullptr);
  EXPECT_EQ(p.pool.acquire(90, at::kFloat, Lane::kCompute).tensor.data_ptr(), memory);
}

TEST(BufferPool, KeepsNothingAfterClear) {
  Pool p;
  p.pool.release(p.pool.acquire(100, at::kFloat, Lane::kCompute),
                 p.streams->record(Lane::kReduceScatter));
  p.pool.clear();
  EXPECT_EQ(p.pool.idle_bytes(), 0);
  EXPECT_EQ(p.streams->log(), (Log{"reduce_scatter: record 1", "compute: wait 1"}));
}

}  // namespace
}  // namespace tessera::fsdp
