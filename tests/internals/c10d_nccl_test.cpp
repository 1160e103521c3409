// Canary (fails if c10d changes): an NCCL process group of c10d, on the fake CUDA of
// tests/fake_cuda. This file includes the header that libtessera_cuda.so uses.

#include "tessera/internals/detail/c10d_nccl.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "tessera/internals/detail/devices.h"

namespace tessera::detail {
namespace {

TEST(C10dNcclCanary, MakesAGroupThatReduces) {
  using namespace std::chrono_literals;
  const c10::Device device(c10::kCUDA, 0);
  const NcclProcessGroupPtr group = make_nccl_group(
      memory_store(), {.rank = 0, .size = 1, .timeout = 30s, .name = "all", .ranks = {0}});
  connect_gpu(*group, device);
  EXPECT_NE(communicator_of(*group), nullptr);
  std::vector<at::Tensor> sum{at::zeros({4}, device)};
  group->allreduce(sum)->wait();
  synchronize(device);
  EXPECT_FALSE(is_captured());
  group->shutdown();
}

TEST(C10dNcclCanary, ReportsVersions) {
  EXPECT_GT(nccl_of_libtorch(), 22000);
  EXPECT_EQ(nccl_of_libtorch() / 100, NCCL_VERSION_CODE / 100);
  EXPECT_TRUE(has_found_cuda());
}

}  // namespace
}  // namespace tessera::detail
