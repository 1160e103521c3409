// The fake refuses what a card refuses.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <future>

#include "checks.h"

// What code compiled by nvcc calls.
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

TEST(FakeLaunches, HaveGridsAndBlocksOfLimitedSizes) {
  expect_ok(launch({2147483647, 65535, 65535}, {16, 1, 64}));
  EXPECT_EQ(launch({0}, {1}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch({1, 65536}, {1}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch({1, 1, 65536}, {1}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch({1}, {1025}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch({1}, {32, 33}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch({1}, {1, 1, 65}), cudaErrorInvalidConfiguration);
}

TEST(FakeLaunches, LeaveTheirErrorBehind) {
  launch({1}, {2048});
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  expect_ok(cudaGetLastError());
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

/// A communicator of one rank, whose buffers are checked as any.
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

TEST_F(FakeBuffers, AreMemoryOfTheDevice) {
  float host = 0;
  float* const device = on_device<float>({0});
  EXPECT_EQ(gather(&host, device, 1), ncclInvalidArgument);
  EXPECT_EQ(gather(device, &host, 1), ncclInvalidArgument);
  EXPECT_EQ(gather(device, device, 1), ncclSuccess);
}

TEST_F(FakeBuffers, EndBeforeTheirMemoryDoes) {
  float* const device = on_device(std::vector<float>(8));
  EXPECT_EQ(gather(device + 4, device + 4, 4), ncclSuccess);
  EXPECT_EQ(gather(device + 4, device + 4, 5), ncclInvalidArgument);
}

TEST_F(FakeBuffers, OverlapInPlaceAlone) {
  float* const device = on_device(std::vector<float>(8));
  EXPECT_EQ(gather(device, device + 4, 4), ncclSuccess);
  EXPECT_EQ(gather(device, device + 3, 4), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(device, device + 1, 2, ncclFloat32, ncclSum, communicator_, stream_),
            ncclInvalidArgument);
}

TEST_F(FakeBuffers, AreAlignedToTheirElements) {
  auto* const bytes = reinterpret_cast<char*>(on_device(std::vector<float>(8)));
  EXPECT_EQ(gather(bytes + 2, bytes + 2, 1), ncclInvalidArgument);
  EXPECT_EQ(gather(bytes + 4, bytes + 4, 1), ncclSuccess);
}

/// What two ranks get that ask for a communicator, each on a device.
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
