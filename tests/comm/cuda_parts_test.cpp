// Tests the parts of the CUDA support that run without a GPU: versions, loading the CUDA library,
// copies through host memory (StagedCommunicator), and LaneScope.
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <thread>

#include "backends.h"
#include "cuda/cuda_backend.h"
#include "group_of_all.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/comm/detail/streams.h"
#include "testing/processes.h"

namespace tessera::comm {
namespace {

TEST(LibraryVersions, OfNcclMustMatchAndAnOlderCudnnWarns) {
  check_nccl({.nccl_header = 22809, .nccl_libtorch = 22809, .nccl_loaded = 22907});
  EXPECT_ERROR(check_nccl({.nccl_header = 22703, .nccl_libtorch = 22809, .nccl_loaded = 22809}),
               "built with the header of NCCL 2.27.3", "libtorch with the header of NCCL 2.28.9",
               "TESSERA_NCCL_INCLUDE");
  EXPECT_ERROR(check_nccl({.nccl_header = 22809, .nccl_libtorch = 22809, .nccl_loaded = 22703}),
               "NCCL 2.27.3 is loaded", "libtorch needs 2.28.9 or newer", "scripts/setup");
  EXPECT_EQ(cudnn_warning({.cudnn_libtorch = 91900, .cudnn_loaded = 92000}), "");
  EXPECT_EQ(cudnn_warning({}), "");
  EXPECT_CONTAINS(cudnn_warning({.cudnn_libtorch = 91900, .cudnn_loaded = 91002}),
                  "cuDNN 9.10.2 is loaded", "libtorch was built with cuDNN 9.19.0");
}

TEST(DISABLED_CudaParts, AfterLibtorchHasLookedForCuda) {
  at::getAccelerator();
  std::cout << testing::message_of([] { thread_worlds(1, {.device = "cuda"}); }) << std::endl;
}

TEST(CudaLibrary, RefusesToLoadAfterLibtorchLookedForCuda) {
  const testing::Ended ended =
      testing::RunProcesses(1, "DISABLED_CudaParts.AfterLibtorchHasLookedForCuda")[0];
  if (ended.output.find("cannot be loaded") != std::string::npos) {
    GTEST_SKIP() << "built without CUDA";
  }
  EXPECT_CONTAINS(ended.output,
                  "device cuda: earlier in this process libtorch was used without CUDA",
                  "make the World of device cuda");
}

TEST_ON_RANKS(StagedCommunicator, SendsTensorGroupsInPlace, 2) {
  const CommunicatorPtr staged = make_staged_communicator(group_of_all(*rank.world()));
  EXPECT_TRUE(staged->moves_groups_in_place());
  EXPECT_FALSE(staged->keeps_order_on_device());
  const std::vector<at::Tensor> gathered = {at::empty({6}), at::empty({2})};
  staged->all_gather_group(gathered, {numbers_from(rank.rank(), 3), numbers_from(rank.rank(), 1)})
      ->wait();
  const std::vector<at::Tensor> reduced = {at::empty({2}), at::empty({1})};
  staged
      ->reduce_scatter_group(reduced, {at::arange(4, at::kFloat), at::full({2}, 5.0)},
                             ReduceOp::kSum)
      ->wait();
  for (int sender = 0; sender < 2; ++sender) {
    EXPECT_TRUE(gathered[0].narrow(0, 3 * sender, 3).equal(numbers_from(sender, 3)));
    EXPECT_TRUE(gathered[1].narrow(0, sender, 1).equal(numbers_from(sender, 1)));
  }
  EXPECT_TRUE(reduced[0].equal(2 * at::arange(4, at::kFloat).narrow(0, 2 * rank.rank(), 2)));
  EXPECT_EQ(reduced[1].item<float>(), 10.0F);
}

TEST(LaneScope, RefusesANestedScopeOfTheSameStreams) {
  const StreamsPtr streams = make_streams(at::kCPU);
  const char* const said =
      "a LaneScope of 'reduce_scatter' began inside another LaneScope of the same Streams";
  {
    const LaneScope scope(*streams, Lane::kAllGather);
    EXPECT_ERROR(LaneScope(*streams, Lane::kReduceScatter), said);
    std::thread([&] { EXPECT_ERROR(LaneScope(*streams, Lane::kReduceScatter), said); }).join();
  }
  const LaneScope later(*streams, Lane::kReduceScatter);
}

}  // namespace
}  // namespace tessera::comm
