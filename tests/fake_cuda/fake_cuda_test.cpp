#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <numeric>
#include <thread>
#include <vector>

// Registers a kernel of a program. nvcc's code calls this function.
extern "C" void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int,
                                       uint3*, uint3*, dim3*, dim3*, int*);

namespace fake_cuda {
namespace {

void expect_ok(cudaError_t error) {
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

cudaStream_t new_stream(int priority = 0) {
  cudaStream_t stream = nullptr;
  expect_ok(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  return stream;
}

cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  expect_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

template <class T>
void write(T* pointer, const std::vector<T>& values) {
  expect_ok(cudaMemcpy(pointer, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
}

template <class T>
T* on_device(const std::vector<T>& values) {
  void* pointer = nullptr;
  expect_ok(cudaMalloc(&pointer, values.size() * sizeof(T)));
  write(static_cast<T*>(pointer), values);
  return static_cast<T*>(pointer);
}

template <class T>
std::vector<T> values_of(const T* pointer, std::size_t count) {
  std::vector<T> values(count);
  expect_ok(cudaMemcpy(values.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

template <class T>
T value_of(const T* pointer) {
  return values_of(pointer, 1).front();
}

/// Blocks a stream, like a long kernel, until open() is called.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    expect_ok(cudaLaunchHostFunc(
        stream, [](void* gate) { static_cast<Gate*>(gate)->opened_.get_future().wait(); }, this));
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

// Tests that streams, events, copies and memory behave as in CUDA.

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

/// A blocked stream sets a value from 1 to 0. A second stream copies the value (after the first
/// stream's work, if `waits`). Returns the copied values before and after the first
/// stream is unblocked.
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

TEST(FakeStreams, SynchronizeOnlyThroughEvents) {
  EXPECT_EQ(copies_of_two_streams(/*waits=*/true), std::pair(7, 0));
  EXPECT_EQ(copies_of_two_streams(/*waits=*/false), std::pair(1, 1));
}

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

TEST(FakeCopies, ReadPageableMemoryImmediatelyAndPinnedMemoryLater) {
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

TEST(FakeMemoryDeathTest, HostAccessToDeviceMemoryCrashes) {
  int* const value = on_device<int>({1});
  const auto touch = [](int* at) { *static_cast<volatile int*>(at) = 2; };
  EXPECT_EXIT(touch(value), ::testing::KilledBySignal(SIGSEGV),
              "the host touches memory of a device");
  EXPECT_EXIT(touch(nullptr), ::testing::KilledBySignal(SIGSEGV), "^$");
  EXPECT_EQ(value_of(value), 1);
}

TEST(FakeHandles, AreRefusedAfterTheirDestruction) {
  cudaEvent_t event = new_event();
  expect_ok(cudaEventDestroy(event));
  EXPECT_EQ(cudaEventRecord(event, nullptr), cudaErrorInvalidResourceHandle);
  cudaStream_t stream = new_stream();
  expect_ok(cudaStreamDestroy(stream));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
}

// Tests that the fake refuses the launches, buffers and ranks that a real GPU or NCCL refuses.

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

TEST(FakeLaunches, RefuseTooLargeGridsAndBlocks) {
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

TEST(FakeLaunches, NeedAnAttributeForLargeSharedMemory) {
  constexpr int kMost = 227 << 10;
  EXPECT_EQ(launch({1}, {1}, (48 << 10) + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(&kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost + 1),
            cudaErrorInvalidValue);
  expect_ok(cudaFuncSetAttribute(&kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost));
  expect_ok(launch({1}, {1}, kMost));
  EXPECT_EQ(launch({1}, {1}, kMost + 1), cudaErrorInvalidValue);
  cudaGetLastError();
}

/// The base of tests that check the buffers of a collective, on a communicator of one rank.
class FakeNcclBuffers : public ::testing::Test {
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

TEST_F(FakeNcclBuffers, MustBeAlignedDeviceMemoryWithoutOverlap) {
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

/// Makes a communicator of two ranks on two devices. Returns each rank's ncclResult_t.
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

// Tests that NCCL calls move the same data as NCCL, and wait like NCCL. Ranks are threads.

void expect_nccl(ncclResult_t result) {
  EXPECT_EQ(result, ncclSuccess) << ncclGetErrorString(result);
}

struct Rank {
  int rank;
  int ranks;
  ncclComm_t communicator;
  cudaStream_t stream;

  void synchronize() const { expect_ok(cudaStreamSynchronize(stream)); }
};

template <class Body>
void on_ranks(int ranks, Body body) {
  ncclUniqueId id;
  expect_nccl(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([=] {
      expect_ok(cudaSetDevice(rank));
      Rank self{rank, ranks, nullptr, new_stream()};
      expect_nccl(ncclCommInitRank(&self.communicator, ranks, id, rank));
      body(self);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

std::vector<float> counting(int first, std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), static_cast<float>(first));
  return values;
}

constexpr std::size_t kMany = 100'000;

TEST(FakeNccl, TransfersMoreThanItsQueueHolds) {
  on_ranks(3, [](const Rank& self) {
    float* const all = on_device(std::vector<float>(3 * kMany));
    float* const own = all + static_cast<std::size_t>(self.rank) * kMany;
    write(own, std::vector<float>(kMany, static_cast<float>(self.rank)));
    expect_nccl(ncclAllGather(own, all, kMany, ncclFloat32, self.communicator, self.stream));
    self.synchronize();
    const std::vector<float> gathered = values_of(all, 3 * kMany);
    for (std::size_t i = 0; i < 3 * kMany; ++i) {
      ASSERT_EQ(gathered[i], static_cast<float>(i / kMany));
    }
    // The calls are grouped, so that a send and a receive do not wait for each other.
    float* const to = on_device(std::vector<float>(kMany));
    const int next = (self.rank + 1) % 3, previous = (self.rank + 2) % 3;
    expect_nccl(ncclGroupStart());
    expect_nccl(ncclSend(own, kMany, ncclFloat32, next, self.communicator, self.stream));
    expect_nccl(ncclRecv(to, kMany, ncclFloat32, previous, self.communicator, self.stream));
    expect_nccl(ncclGroupEnd());
    self.synchronize();
    EXPECT_EQ(value_of(to + kMany - 1), static_cast<float>(previous));
    expect_nccl(ncclCommDestroy(self.communicator));
  });
}

TEST(FakeNccl, CollectivesGiveTheCorrectResults) {
  on_ranks(3, [](const Rank& self) {
    const auto own = static_cast<float>(self.rank);
    float* const values = on_device(counting(self.rank, 6));
    float* const part = values + 2 * self.rank;
    expect_nccl(
        ncclReduceScatter(values, part, 2, ncclFloat32, ncclSum, self.communicator, self.stream));
    self.synchronize();
    EXPECT_EQ(values_of(part, 2), (std::vector<float>{6 * own + 3, 6 * own + 6}));
    float* const value = on_device<float>({own});
    expect_nccl(ncclBroadcast(value, value, 1, ncclFloat32, 2, self.communicator, self.stream));
    self.synchronize();
    EXPECT_EQ(value_of(value), 2);
    float* const from = on_device(counting(10 * self.rank, 3));
    float* const to = on_device(std::vector<float>(3));
    expect_nccl(ncclAlltoAll(from, to, 1, ncclFloat32, self.communicator, self.stream));
    self.synchronize();
    EXPECT_EQ(values_of(to, 3), (std::vector<float>{own, 10 + own, 20 + own}));
  });
}

/// Tests each reduction with the values 2, 3 and 4 of three ranks.
template <class T>
void expect_reductions(ncclDataType_t type) {
  on_ranks(3, [type](const Rank& self) {
    const std::pair<ncclRedOp_t, float> reductions[] = {
        {ncclSum, 9.0F}, {ncclAvg, 3.0F}, {ncclProd, 24.0F}, {ncclMax, 4.0F}, {ncclMin, 2.0F}};
    for (const auto& [op, expected] : reductions) {
      T* const value = on_device<T>({static_cast<T>(self.rank + 2.0F)});
      expect_nccl(ncclAllReduce(value, value, 1, type, op, self.communicator, self.stream));
      self.synchronize();
      EXPECT_EQ(static_cast<float>(value_of(value)), expected) << op;
    }
  });
}

TEST(FakeNccl, SupportsEveryReductionOfEveryType) {
  expect_reductions<std::int8_t>(ncclInt8);
  expect_reductions<std::uint8_t>(ncclUint8);
  expect_reductions<std::int32_t>(ncclInt32);
  expect_reductions<std::int64_t>(ncclInt64);
  expect_reductions<__half>(ncclFloat16);
  expect_reductions<__nv_bfloat16>(ncclBfloat16);
  expect_reductions<float>(ncclFloat32);
  expect_reductions<double>(ncclFloat64);
}

class TwoCommunicators {
 public:
  explicit TwoCommunicators(const Rank& self) : first_(self), second_(self) {
    expect_nccl(ncclCommSplit(self.communicator, 0, self.rank, &second_.communicator, nullptr));
    second_.stream = new_stream();
  }

  /// Runs `call` for the first, then the second communicator; on rank 1 in the reverse order.
  template <class Call>
  void in_any_order(const Call& call) const {
    const bool reversed = first_.rank == 1;
    call(reversed ? second_ : first_);
    call(reversed ? first_ : second_);
  }

  /// Waits only for the streams of this rank. The other rank's streams on the same device can wait
  /// for this rank, so waiting for the device could deadlock.
  void synchronize() const {
    first_.synchronize();
    second_.synchronize();
  }

 private:
  Rank first_;
  Rank second_;
};

TEST(FakeNccl, TwoStreamsCanIssueInAnyOrder) {
  on_ranks(2, [](const Rank& self) {
    const TwoCommunicators both(self);
    float* const sums = on_device(std::vector<float>(2, 1));
    const auto reduce = [&](const Rank& rank) {
      float* const sum = sums + (rank.stream == self.stream ? 0 : 1);
      expect_nccl(ncclAllReduce(sum, sum, 1, ncclFloat32, ncclSum, rank.communicator, rank.stream));
    };
    both.in_any_order(reduce);
    both.synchronize();
    expect_nccl(ncclGroupStart());
    both.in_any_order(reduce);
    expect_nccl(ncclGroupEnd());
    both.synchronize();
    EXPECT_EQ(values_of(sums, 2), (std::vector<float>{4, 4}));
  });
}

TEST(FakeNccl, SplitsByColorAndKey) {
  on_ranks(4, [](const Rank& self) {
    ncclComm_t half = nullptr;
    expect_nccl(ncclCommSplit(self.communicator, self.rank % 2, -self.rank, &half, nullptr));
    int rank = -1;
    int count = 0;
    expect_nccl(ncclCommUserRank(half, &rank));
    expect_nccl(ncclCommCount(half, &count));
    EXPECT_EQ(count, 2);
    EXPECT_EQ(rank, self.rank < 2 ? 1 : 0);
    int* const sum = on_device<int>({self.rank});
    expect_nccl(ncclAllReduce(sum, sum, 1, ncclInt32, ncclSum, half, self.stream));
    self.synchronize();
    EXPECT_EQ(value_of(sum), self.rank % 2 == 0 ? 2 : 4);
  });
}

TEST(FakeNccl, SplitWithoutColorReturnsNoCommunicator) {
  on_ranks(2, [](const Rank& self) {
    ncclComm_t alone = nullptr;
    const int color = self.rank == 0 ? 5 : NCCL_SPLIT_NOCOLOR;
    expect_nccl(ncclCommSplit(self.communicator, color, 0, &alone, nullptr));
    EXPECT_EQ(alone != nullptr, self.rank == 0);
    expect_nccl(ncclCommFinalize(self.communicator));
    expect_nccl(ncclCommDestroy(self.communicator));
    EXPECT_EQ(ncclCommDestroy(self.communicator), ncclInvalidArgument);
  });
}

/// Expects that a lost all-reduce blocks its stream until an abort, but does not block the host.
void expect_no_end(const Rank& self, std::size_t count) {
  int* const values = on_device<int>({1, 1, 1, 1});
  expect_nccl(
      ncclAllReduce(values, values, count, ncclInt32, ncclSum, self.communicator, self.stream));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
  expect_nccl(ncclCommAbort(self.communicator));
  self.synchronize();
}

TEST(FakeNccl, UnmatchedCollectivesNeverEnd) {
  on_ranks(2, [](const Rank& self) {
    if (self.rank == 0) {
      expect_no_end(self, 1);
    }
  });
  on_ranks(2, [](const Rank& self) { expect_no_end(self, self.rank == 0 ? 1 : 2); });
}

}  // namespace
}  // namespace fake_cuda
