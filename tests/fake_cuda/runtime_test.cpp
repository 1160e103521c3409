// The fake's streams, events, copies and memory behave as CUDA's.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "checks.h"
#include "record/settings.h"

namespace fake_cuda {
namespace {

TEST(FakeStreams, HostContinuesWhileAStreamWorks) {
  cudaStream_t stream = new_stream();
  Gate gate(stream);
  int* const value = on_device<int>({1});
  expect_ok(cudaMemsetAsync(value, 0, sizeof(int), stream));
  EXPECT_EQ(value_of(value), 1);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  gate.open();
  expect_ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(value_of(value), 0);
  expect_ok(cudaStreamQuery(stream));
}

TEST(FakeStreams, OneWaitsForTheEventOfAnother) {
  cudaStream_t first = new_stream();
  cudaStream_t second = new_stream();
  cudaEvent_t event = new_event();
  int* const value = on_device<int>({1});
  Gate gate(first);
  expect_ok(cudaMemsetAsync(value, 0, sizeof(int), first));
  expect_ok(cudaEventRecord(event, first));
  expect_ok(cudaStreamWaitEvent(second, event, 0));
  int* const copy = on_device<int>({7});
  expect_ok(cudaMemcpyAsync(copy, value, sizeof(int), cudaMemcpyDeviceToDevice, second));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(value_of(copy), 7);
  gate.open();
  expect_ok(cudaStreamSynchronize(second));
  EXPECT_EQ(value_of(copy), 0);
}

TEST(FakeStreams, DoNotWaitForEachOtherWithoutAWait) {
  cudaStream_t first = new_stream();
  cudaStream_t second = new_stream();
  int* const value = on_device<int>({1});
  Gate gate(first);
  expect_ok(cudaMemsetAsync(value, 0, sizeof(int), first));
  int* const copy = on_device<int>({7});
  expect_ok(cudaMemcpyAsync(copy, value, sizeof(int), cudaMemcpyDeviceToDevice, second));
  expect_ok(cudaStreamSynchronize(second));
  EXPECT_EQ(value_of(copy), 1);
  gate.open();
  expect_ok(cudaDeviceSynchronize());
}

TEST(FakeCopies, PageableMemoryMayChangeAfterTheCall) {
  cudaStream_t stream = new_stream();
  Gate gate(stream);
  int host = 1;
  int* const value = on_device<int>({0});
  expect_ok(cudaMemcpyAsync(value, &host, sizeof(int), cudaMemcpyHostToDevice, stream));
  host = 2;
  gate.open();
  expect_ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(value_of(value), 1);
}

TEST(FakeCopies, PinnedMemoryIsReadWhenTheStreamGetsThere) {
  cudaStream_t stream = new_stream();
  Gate gate(stream);
  void* pinned = nullptr;
  expect_ok(cudaHostAlloc(&pinned, sizeof(int), 0));
  auto* const host = static_cast<int*>(pinned);
  *host = 1;
  int* const value = on_device<int>({0});
  expect_ok(cudaMemcpyAsync(value, host, sizeof(int), cudaMemcpyHostToDevice, stream));
  *host = 2;
  gate.open();
  expect_ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(value_of(value), 2);
}

TEST(FakeMemory, IsCountedPerDevice) {
  std::size_t before = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  expect_ok(cudaSetDevice(1));
  expect_ok(cudaMemGetInfo(&before, &total));
  void* pointer = nullptr;
  expect_ok(cudaMalloc(&pointer, 1000));
  expect_ok(cudaMemGetInfo(&after, &total));
  EXPECT_EQ(before - after, 1000);
  cudaPointerAttributes attributes{};
  expect_ok(cudaPointerGetAttributes(&attributes, static_cast<char*>(pointer) + 999));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 1);
  expect_ok(cudaFree(pointer));
  expect_ok(cudaMemGetInfo(&after, &total));
  EXPECT_EQ(before, after);
  expect_ok(cudaSetDevice(0));
}

TEST(FakeMemory, MoreThanADeviceHasIsRefused) {
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, std::size_t{200} << 30), cudaErrorMemoryAllocation);
}

TEST(FakeMemoryDeathTest, OfADeviceIsNotTheHosts) {
  int* const value = on_device<int>({1});
  const auto touch = [](int* at) { *static_cast<volatile int*>(at) = 2; };
  EXPECT_EXIT(touch(value), ::testing::KilledBySignal(SIGSEGV),
              "the host touches memory of a device");
  EXPECT_EXIT(touch(nullptr), ::testing::KilledBySignal(SIGSEGV), "^$");
  EXPECT_EQ(value_of(value), 1);
}

TEST(FakeHandles, EndedOnesAreRefused) {
  cudaEvent_t event = new_event();
  expect_ok(cudaEventDestroy(event));
  EXPECT_EQ(cudaEventRecord(event, nullptr), cudaErrorInvalidResourceHandle);
  cudaStream_t stream = new_stream();
  expect_ok(cudaStreamDestroy(stream));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
}

TEST(FakeSettings, FaultsAreOfOneRankOrOfAll) {
  const Faults faults = parse_faults("malloc:3@1,lost:7", 1);
  EXPECT_EQ(faults.malloc, 3);
  EXPECT_EQ(faults.lost, 7);
  EXPECT_EQ(parse_faults("malloc:3@1,lost:7", 0).malloc, std::nullopt);
  for (const char* const bad : {"malloc", "malloc:x", "mallocs:1", "nccl:1@"}) {
    try {
      parse_faults(bad, 0);
      ADD_FAILURE() << bad << " was taken";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("TESSERA_FAKE_CUDA_FAULT: "), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace fake_cuda
