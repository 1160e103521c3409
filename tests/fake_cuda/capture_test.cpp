// Stream capture on the fake: a graph repeats what was captured, and unsafe calls are refused.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <thread>

#include "checks.h"

namespace fake_cuda {
namespace {

class FakeCapture : public testing::Test {
 protected:
  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    expect_ok(cudaStreamBeginCapture(stream_, mode));
  }

  cudaError_t end() { return cudaStreamEndCapture(stream_, &graph_); }

  void launch() {
    cudaGraphExec_t executable = nullptr;
    expect_ok(cudaGraphInstantiateWithFlags(&executable, graph_, 0));
    expect_ok(cudaGraphLaunch(executable, stream_));
    expect_ok(cudaStreamSynchronize(stream_));
    expect_ok(cudaGraphExecDestroy(executable));
  }

  cudaStream_t stream_ = new_stream();
  cudaGraph_t graph_ = nullptr;
};

TEST_F(FakeCapture, WorkIsDoneAtEachLaunch) {
  int* const value = on_device<int>({1});
  begin();
  expect_ok(cudaMemsetAsync(value, 0, sizeof(int), stream_));
  expect_ok(end());
  EXPECT_EQ(value_of(value), 1);
  for (int i = 0; i < 2; ++i) {
    write(value, {1});
    launch();
    EXPECT_EQ(value_of(value), 0);
  }
}

TEST_F(FakeCapture, OtherStreamsJoinByEvents) {
  cudaStream_t other = new_stream();
  cudaEvent_t fork = new_event();
  cudaEvent_t join = new_event();
  int* const value = on_device<int>({1});
  begin();
  expect_ok(cudaEventRecord(fork, stream_));
  expect_ok(cudaStreamWaitEvent(other, fork, 0));
  expect_ok(cudaMemsetAsync(value, 0, sizeof(int), other));
  expect_ok(cudaEventRecord(join, other));
  expect_ok(cudaStreamWaitEvent(stream_, join, 0));
  expect_ok(end());
  EXPECT_EQ(value_of(value), 1);
  launch();
  EXPECT_EQ(value_of(value), 0);
}

TEST_F(FakeCapture, StreamThatIsNotJoinedIsAnError) {
  cudaStream_t other = new_stream();
  cudaEvent_t fork = new_event();
  begin();
  expect_ok(cudaEventRecord(fork, stream_));
  expect_ok(cudaStreamWaitEvent(other, fork, 0));
  EXPECT_EQ(end(), cudaErrorStreamCaptureUnjoined);
}

TEST_F(FakeCapture, UnsafeCallsAreRefusedAndEndIt) {
  begin();
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, 8), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  begin();
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  begin();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(FakeCapture, EventFromOutsideIsRefused) {
  cudaEvent_t before = new_event();
  expect_ok(cudaEventRecord(before, stream_));
  begin();
  EXPECT_EQ(cudaStreamWaitEvent(stream_, before, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(FakeCapture, ModesSayWhichThreadsMayAllocate) {
  const auto allocate = [] {
    void* pointer = nullptr;
    return cudaMalloc(&pointer, 8);
  };
  const auto elsewhere = [&] {
    cudaError_t error = cudaSuccess;
    std::thread([&] { error = allocate(); }).join();
    return error;
  };
  begin(cudaStreamCaptureModeThreadLocal);
  expect_ok(elsewhere());
  expect_ok(end());
  begin(cudaStreamCaptureModeGlobal);
  EXPECT_EQ(elsewhere(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  begin(cudaStreamCaptureModeGlobal);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  expect_ok(cudaThreadExchangeStreamCaptureMode(&mode));
  expect_ok(allocate());
  expect_ok(cudaThreadExchangeStreamCaptureMode(&mode));
  expect_ok(end());
}

}  // namespace
}  // namespace fake_cuda
