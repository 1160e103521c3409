// Convolutions whose input is split in space: values and gradients in every placement against the
// plain tensor, and what is sent.

#include "dtensor/operators/operator_case.h"
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::OperatorCase;
using Sizes = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

struct Steps {
  Sizes stride{1}, padding{0}, dilation{1};
  std::int64_t groups = 1;
};

OperatorCase convolution(std::string name, std::vector<Sizes> inputs, Steps steps) {
  return {std::move(name), std::move(inputs), [steps](const Tensors& t) {
            return at::convolution(t[0], t[1], t.size() > 2 ? t[2] : at::Tensor(), steps.stride,
                                   steps.padding, steps.dilation, false, {0}, steps.groups);
          }};
}

const std::vector<OperatorCase>& cases() {
  static const std::vector<OperatorCase> all{
      convolution("same", {{2, 2, 8}, {3, 2, 3}, {3}}, {.padding = {1}}),
      convolution("uneven", {{2, 2, 10}, {3, 2, 3}, {3}}, {.padding = {1}}),
      convolution("empty_shard_of_input", {{2, 2, 6}, {3, 2, 3}, {3}}, {.padding = {1}}),
      convolution("empty_shard_of_result", {{2, 2, 9}, {3, 2, 4}, {3}}, {}),
      convolution("fewer_results_than_ranks", {{2, 2, 9}, {3, 2, 3}, {3}}, {.stride = {4}}),
      convolution("kernel_beyond_the_neighbour", {{2, 2, 9}, {3, 2, 7}, {3}}, {.padding = {3}}),
      convolution("kernel_as_large_as_the_whole", {{2, 2, 8}, {3, 2, 8}, {3}}, {}),
      convolution("even_kernel", {{2, 2, 11}, {3, 2, 4}}, {.padding = {2}}),
      convolution("stride", {{2, 2, 13}, {3, 2, 3}, {3}}, {.stride = {2}, .padding = {1}}),
      convolution("stride_beyond_the_kernel", {{2, 2, 17}, {3, 2, 2}}, {.stride = {3}}),
      convolution("patches", {{2, 2, 12}, {3, 2, 3}, {3}}, {.stride = {3}}),
      convolution("dilation", {{2, 2, 14}, {3, 2, 3}}, {.padding = {2}, .dilation = {3}}),
      convolution("padding_beyond_the_kernel", {{2, 2, 8}, {3, 2, 3}, {3}}, {.padding = {6}}),
      convolution("groups", {{2, 4, 9}, {6, 2, 3}, {6}}, {.padding = {1}, .groups = 2}),
      convolution("depthwise", {{2, 4, 9}, {4, 1, 3}, {4}}, {.padding = {1}, .groups = 4}),
      convolution("plane", {{2, 2, 7, 6}, {3, 2, 3, 3}, {3}}, {.padding = {1}}),
      convolution("plane_of_unlike_steps", {{2, 2, 9, 8}, {3, 2, 2, 3}, {3}},
                  {.stride = {2, 1}, .padding = {0, 2}, .dilation = {1, 2}}),
  };
  return all;
}

at::Tensor operand(const DeviceMesh& mesh, Placement placement, const Sizes& sizes) {
  return distribute_tensor(testing::values(sizes), mesh, {placement})
      .tensor()
      .detach()
      .requires_grad_();
}

class SpatialConvolution : public ::testing::TestWithParam<OperatorCase> {};

TEST_P(SpatialConvolution, IsRightOnALine) {
  testing::expect_equals_one_rank(GetParam(), {4});
}

TEST_P(SpatialConvolution, IsRightOnAGrid) {
  testing::expect_equals_one_rank(GetParam(), {2, 2});
}

INSTANTIATE_TEST_SUITE_P(All, SpatialConvolution, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(SpatialConvolution, KeepsTheInputSplit) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    Tensors operands;
    for (const auto& sizes : GetParam().inputs) {
      const Placement placement = operands.empty() ? Placement{Shard{2}} : Placement{Replicate{}};
      operands.push_back(operand(mesh, placement, sizes));
    }
    const DistributedTensor result(GetParam().run(operands));
    EXPECT_EQ(to_string(result.placements()), "[Shard(2)]");
  });
}

TEST(SpatialConvolution, IsRightInThreeDimensions) {
  testing::expect_equals_one_rank(
      convolution("volume", {{1, 2, 5, 4, 6}, {2, 2, 3, 3, 3}, {2}}, {.padding = {1}}), {4});
}

/// Leaves of a convolution: the input split in space, the weight everywhere.
struct Operands {
  Operands(const DeviceMesh& mesh, const Sizes& input, const Sizes& kernel)
      : x(operand(mesh, Shard{2}, input)), w(operand(mesh, Replicate{}, kernel)) {}
  at::Tensor x, w;
};

/// What this rank sends in all-to-alls: the weight's gradient is all-reduced besides.
std::int64_t exchanged(const CommunicationScope& scope) {
  std::int64_t bytes = 0;
  for (const auto& [key, traffic] : scope.table()) {
    if (key.second == "all_to_all") {
      bytes += traffic.bytes;
    }
  }
  return bytes;
}

/// Bytes that this rank sends in the forward and in the backward pass of a convolution with padding
/// that keeps the size.
std::vector<std::int64_t> bytes_sent(const DeviceMesh& mesh, const Sizes& input,
                                     const Sizes& kernel) {
  const Operands on(mesh, input, kernel);
  const CommunicationScope forward(mesh);
  const auto result = at::conv1d(on.x, on.w, {}, 1, kernel[2] / 2);
  EXPECT_EQ(to_string(DistributedTensor(result).placements()), "[Shard(2)]");
  const auto sent = exchanged(forward);
  const CommunicationScope backward(mesh);
  result.backward(at::ones_like(result));
  return {sent, exchanged(backward)};
}

/// A convolution's value and gradients, whole.
Tensors outcome(at::Tensor x, at::Tensor w, const Steps& steps) {
  const auto result =
      at::convolution(x, w, {}, steps.stride, steps.padding, steps.dilation, false, {0}, 1);
  result.mul(result).sum().backward();
  Tensors found{result.detach(), x.grad(), w.grad()};
  for (auto& tensor : found) {
    if (tessera::is_distributed(tensor)) {
      tensor = DistributedTensor(tensor).full_tensor();
    }
  }
  return found;
}

void expect_right(const DeviceMesh& mesh, std::int64_t size, std::int64_t kernel,
                  const Steps& steps) {
  const Operands on(mesh, {1, 1, size}, {2, 1, kernel});
  const auto plain = [](const at::Tensor& tensor) {
    return DistributedTensor(tensor.detach()).full_tensor().requires_grad_();
  };
  const auto expected = outcome(plain(on.x), plain(on.w), steps);
  const auto found = outcome(on.x, on.w, steps);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(at::allclose(found[i], expected[i], 1e-9, 1e-12))
        << "size " << size << ", kernel " << kernel << ", stride " << steps.stride[0]
        << ", padding " << steps.padding[0] << ", dilation " << steps.dilation[0];
  }
}

TEST(SpatialConvolution, IsRightForAllSteps) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    for (const std::int64_t size : {7, 12}) {
      for (const std::int64_t kernel : {1, 2, 4}) {
        for (const std::int64_t stride : {1, 2, 3}) {
          for (const std::int64_t padding : {0, 2}) {
            for (const std::int64_t dilation : {1, 2}) {
              expect_right(mesh, size, kernel, {{stride}, {padding}, {dilation}});
            }
          }
        }
      }
    }
  });
}

TEST(SpatialConvolution, TransposedIsGathered) {
  const OperatorCase transposed{"", {{2, 2, 7}, {2, 3, 3}}, [](const Tensors& t) {
                                  return at::conv_transpose1d(t[0], t[1], {}, 2, 1);
                                }};
  testing::expect_equals_one_rank(transposed, {4});
}

TEST(SpatialConvolution, SendsOnlyTheEdges) {
  RunOnMesh({4}, {"x"}, [](Rank& rank, const DeviceMesh& mesh) {
    // Rows of 2 x 3 doubles; PyTorch sends two of them from each rank, once around the ring.
    const std::int64_t row = 2 * 3 * 8;
    const std::int64_t rows = rank.rank() == 0 || rank.rank() == 3 ? 1 : 2;
    EXPECT_EQ(bytes_sent(mesh, {2, 3, 16}, {4, 3, 3}), (std::vector{rows * row, 2 * rows * row}));
  });
}

TEST(SpatialConvolution, SendsToAllWhomAKernelReaches) {
  RunOnMesh({4}, {"x"}, [](Rank& rank, const DeviceMesh& mesh) {
    // Two positions each, three to the left and three to the right of each are needed.
    const std::vector<std::int64_t> positions{3, 5, 5, 3};
    const auto sent = positions[static_cast<std::size_t>(rank.rank())] * 8;
    EXPECT_EQ(bytes_sent(mesh, {1, 1, 8}, {1, 1, 7}), (std::vector{sent, 2 * sent}));
  });
}

TEST(SpatialConvolution, NeedsNoWindowForTheGradientOfTheInputAlone) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const Operands on(mesh, {1, 1, 8}, {1, 1, 3});
    const auto result = at::conv1d(on.x, on.w.detach(), {}, 1, 1);
    const CommunicationScope backward(mesh);
    result.backward(at::ones_like(result));
    EXPECT_EQ(exchanged(backward), 8);
  });
}

TEST(SpatialConvolution, SendsNothingBackForTheGradientOfTheWeightAlone) {
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const Operands on(mesh, {1, 1, 8}, {1, 1, 3});
    const auto result = at::conv1d(on.x.detach(), on.w, {}, 1, 1);
    const CommunicationScope backward(mesh);
    result.backward(at::ones_like(result));
    EXPECT_EQ(exchanged(backward), 8);
    const auto sum = DistributedTensor(on.x.detach()).full_tensor().sum().item<double>();
    const auto middle = DistributedTensor(on.w.grad()).full_tensor()[0][0][1].item<double>();
    EXPECT_NEAR(middle, sum, 1e-12);
  });
}

TEST(SpatialConvolution, IsRefusedInAStrictScopeIfItCommunicates) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const Operands on(mesh, {1, 1, 16}, {1, 1, 2});
    const StrictScope strict;
    EXPECT_ERROR(at::conv1d(on.x, on.w), "convolution", "strict scope refuses");
    EXPECT_NO_THROW(at::conv1d(on.x, on.w, {}, 2));
  });
}

TEST(SpatialConvolution, RefusesWhatLibtorchRefusesOnAllRanks) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const Operands on(mesh, {1, 2, 16}, {1, 3, 2}), large(mesh, {1, 1, 6}, {1, 1, 7});
    EXPECT_THROWN(std::exception, at::conv1d(on.x, on.w),
                  "expected input[1, 2, 16] to have 3 channels");
    EXPECT_THROWN(std::exception, at::conv1d(large.x, large.w),
                  "Kernel size can't be greater than actual input size");
  });
}

TEST(SpatialConvolution, WithoutChannelsHasLibtorchsSizes) {
  RunOnMesh({4}, {"x"}, [](const DeviceMesh& mesh) {
    const auto x = at::ones({3, 0, 1}), w = at::ones({4, 0, 1});
    const auto on = distribute_tensor(x, mesh, {Shard{0}}).tensor();
    const auto by = distribute_tensor(w, mesh, {Shard{0}}).tensor();
    EXPECT_EQ(at::conv1d(on, by).sizes(), at::conv1d(x, w).sizes());
  });
}

}  // namespace
}  // namespace tessera
