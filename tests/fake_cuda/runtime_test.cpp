#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <future>
#include <thread>

#include "checks.h"
#include "record/record.h"

// The fake's streams, events, copies and memory behave as CUDA's.

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

/// One stream clears a value behind a gate; another stream copies the value, after an event of the
/// first if `waits`. Returns the copy before and after the gate opens.
std::pair<int, int> copies_of_two_streams(bool waits) {
  cudaStream_t first = new_stream();
  cudaStream_t second = new_stream();
  cudaEvent_t event = new_event();
  int* const value = on_device<int>({1});
  int* const copy = on_device<int>({7});
  Gate gate(first);
  expect_ok(cudaMemsetAsync(value, 0, sizeof(int), first));
  expect_ok(cudaEventRecord(event, first));
  if (waits) {
    expect_ok(cudaStreamWaitEvent(second, event, 0));
  }
  expect_ok(cudaMemcpyAsync(copy, value, sizeof(int), cudaMemcpyDeviceToDevice, second));
  if (!waits) {
    expect_ok(cudaStreamSynchronize(second));
  }
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  const int before = value_of(copy);
  gate.open();
  expect_ok(cudaDeviceSynchronize());
  return {before, value_of(copy)};
}

TEST(FakeStreams, WaitForEachOtherByEventsOnly) {
  EXPECT_EQ(copies_of_two_streams(/*waits=*/true), std::pair(7, 0));
  EXPECT_EQ(copies_of_two_streams(/*waits=*/false), std::pair(1, 1));
}

/// The copy of `host`, which is 1 when the copy is issued and 2 when it runs.
int copy_of_changed(int* host) {
  cudaStream_t stream = new_stream();
  Gate gate(stream);
  int* const value = on_device<int>({0});
  *host = 1;
  expect_ok(cudaMemcpyAsync(value, host, sizeof(int), cudaMemcpyHostToDevice, stream));
  *host = 2;
  gate.open();
  expect_ok(cudaStreamSynchronize(stream));
  return value_of(value);
}

TEST(FakeCopies, ReadPageableMemoryAtTheCallAndPinnedMemoryLater) {
  int pageable = 0;
  void* pinned = nullptr;
  expect_ok(cudaHostAlloc(&pinned, sizeof(int), 0));
  EXPECT_EQ(copy_of_changed(&pageable), 1);
  EXPECT_EQ(copy_of_changed(static_cast<int*>(pinned)), 2);
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
  EXPECT_EQ(cudaMalloc(&pointer, std::size_t{200} << 30), cudaErrorMemoryAllocation);
  expect_ok(cudaSetDevice(0));
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

// The fake refuses what a card refuses.

// A call that nvcc generates.
extern "C" void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int,
                                       uint3*, uint3*, dim3*, dim3*, int*);

namespace fake_cuda {
namespace {

const char kKernel = 0;

cudaError_t launch(dim3 grid, dim3 block, std::size_t shared_bytes = 0) {
  static const bool once = [] {
    __cudaRegisterFunction(nullptr, &kKernel, nullptr, "kernel", -1, nullptr, nullptr, nullptr,
                           nullptr, nullptr);
    return true;
  }();
  static_cast<void>(once);
  return cudaLaunchKernel(&kKernel, grid, block, nullptr, shared_bytes, nullptr);
}

TEST(FakeLaunches, HaveGridsAndBlocksOfLimitedSizesAndLeaveTheirErrorBehind) {
  expect_ok(launch({2147483647, 65535, 65535}, {16, 1, 64}));
  const std::pair<dim3, dim3> refused[] = {{{0}, {1}},    {{1, 65536}, {1}}, {{1, 1, 65536}, {1}},
                                           {{1}, {1025}}, {{1}, {32, 33}},   {{1}, {1, 1, 65}}};
  for (const auto& [grid, block] : refused) {
    EXPECT_EQ(launch(grid, block), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
    expect_ok(cudaGetLastError());
  }
}

TEST(FakeLaunches, HaveMuchSharedMemoryOnlyIfTheyAskFirst) {
  constexpr int kMost = 227 << 10;
  EXPECT_EQ(launch({1}, {1}, (48 << 10) + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(&kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost + 1),
            cudaErrorInvalidValue);
  expect_ok(cudaFuncSetAttribute(&kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost));
  expect_ok(launch({1}, {1}, kMost));
  EXPECT_EQ(launch({1}, {1}, kMost + 1), cudaErrorInvalidValue);
  cudaGetLastError();
}

/// The name of a kernel that takes 8 elements at a time: silu_mul_kernel<c10::BFloat16,
/// 8>(SiluMul).
constexpr const char* kVectorKernel =
    "_ZN7tessera7kernels15silu_mul_kernelIN3c108BFloat16ELi8EEEvNS0_7SiluMulE";

TEST(FakeLaunches, OfVectorsTakeAlignedAddresses) {
  static const char kernel = 0;
  __cudaRegisterFunction(nullptr, &kernel, nullptr, kVectorKernel, -1, nullptr, nullptr, nullptr,
                         nullptr, nullptr);
  const auto launch_on = [](const char* gate, const char* up) {
    const void* call[32] = {gate, up};  // at least as large as SiluMul
    void* arguments[] = {call};
    return cudaLaunchKernel(&kernel, {1}, {1}, arguments, 0, nullptr);
  };
  const auto* const device = reinterpret_cast<const char*>(on_device(std::vector<float>(8)));
  expect_ok(launch_on(device, device + 16));
  EXPECT_EQ(launch_on(device, device + 4), cudaErrorMisalignedAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMisalignedAddress);
}

/// A communicator of one rank.
class FakeBuffers : public ::testing::Test {
 protected:
  void SetUp() override {
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    ASSERT_EQ(ncclCommInitRank(&communicator_, 1, id, 0), ncclSuccess);
  }
  void TearDown() override { EXPECT_EQ(ncclCommDestroy(communicator_), ncclSuccess); }

  ncclResult_t gather(const void* send, void* receive, std::size_t count) {
    return ncclAllGather(send, receive, count, ncclFloat32, communicator_, stream_);
  }

  ncclComm_t communicator_ = nullptr;
  cudaStream_t stream_ = new_stream();
};

TEST_F(FakeBuffers, AreAlignedMemoryOfTheDeviceThatOverlapsInPlaceAlone) {
  float host = 0;
  float* const device = on_device(std::vector<float>(8));
  auto* const bytes = reinterpret_cast<char*>(device);
  EXPECT_EQ(gather(&host, device, 1), ncclInvalidArgument);
  EXPECT_EQ(gather(device, &host, 1), ncclInvalidArgument);
  EXPECT_EQ(gather(device, device, 1), ncclSuccess);
  EXPECT_EQ(gather(device + 4, device + 4, 4), ncclSuccess);
  EXPECT_EQ(gather(device + 4, device + 4, 5), ncclInvalidArgument);
  EXPECT_EQ(gather(device, device + 4, 4), ncclSuccess);
  EXPECT_EQ(gather(device, device + 3, 4), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(device, device + 1, 2, ncclFloat32, ncclSum, communicator_, stream_),
            ncclInvalidArgument);
  EXPECT_EQ(gather(bytes + 2, bytes + 2, 1), ncclInvalidArgument);
  EXPECT_EQ(gather(bytes + 4, bytes + 4, 1), ncclSuccess);
}

/// The results of two ranks that make a communicator on these devices.
std::vector<ncclResult_t> results_on_devices(int first, int second) {
  ncclUniqueId id;
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  std::vector<std::future<ncclResult_t>> ranks;
  for (const int rank : {0, 1}) {
    ranks.push_back(std::async(std::launch::async, [=] {
      expect_ok(cudaSetDevice(rank == 0 ? first : second));
      ncclComm_t communicator = nullptr;
      const ncclResult_t made = ncclCommInitRank(&communicator, 2, id, rank);
      if (made == ncclSuccess) {
        EXPECT_EQ(ncclCommDestroy(communicator), ncclSuccess);
      }
      return made;
    }));
  }
  return {ranks[0].get(), ranks[1].get()};
}

TEST(FakeNccl, RefusesRanksOfOneHostThatShareADevice) {
  EXPECT_EQ(results_on_devices(0, 1), (std::vector{ncclSuccess, ncclSuccess}));
  EXPECT_EQ(results_on_devices(1, 1), (std::vector{ncclInvalidUsage, ncclInvalidUsage}));
}

}  // namespace
}  // namespace fake_cuda
