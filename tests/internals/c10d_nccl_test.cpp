// Canary: a group of NCCL's through c10d, on a CUDA that is none (tests/fake_cuda). It compiles
// with the header that libtessera_cuda.so uses, and makes each call once.

#include "tessera/internals/detail/c10d_nccl.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <chrono>

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
  const at::Tensor x = at::zeros({4}, device);
  start_all_reduce(*group, x, GroupReduceOp::SUM)->wait();
  start_all_gather(*group, at::zeros({4}, device), x)->wait();
  start_reduce_scatter(*group, at::zeros({4}, device), x, GroupReduceOp::SUM)->wait();
  start_broadcast(*group, x, 0)->wait();
  synchronize(device);
  EXPECT_FALSE(is_captured());
  group->shutdown();
}

TEST(C10dNcclCanary, TellsVersions) {
  EXPECT_GT(nccl_of_libtorch(), 22000);
  EXPECT_EQ(nccl_of_libtorch() / 100, NCCL_VERSION_CODE / 100);
  EXPECT_TRUE(has_found_cuda());
}

}  // namespace
}  // namespace tessera::detail
