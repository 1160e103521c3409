// Blocks of converted Linears on several ranks against one rank. Rows are scaled by the part that a
// rank has, which changes values only where they are subnormal; the sums of the parts differ by the
// rounding of fp32, and where that moves a number across a boundary of the format, by one step.
#include "tessera/kernels/fp8.h"
#include "tessera/nn/fp8.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/tensor_parallel/styles.h"
#include "testing/distributed.h"
#include "testing/module_values.h"
#include "testing/small_llama.h"

namespace tessera::tensor_parallel {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr testing::SmallLlamaConfig kConfig{.dim = 32, .inner = 64, .hidden = 64};

struct ConvertedBlock : testing::Filled<testing::LlamaBlock> {
  ConvertedBlock() : testing::Filled<testing::LlamaBlock>(kConfig) {
    nn::convert_to_fp8(*this, {.multiple_of = 4});
  }
};

/// The result and the gradients of x and the parameters.
template <class Forward>
Tensors step(testing::LlamaBlock& block, const at::Tensor& x, Forward&& whole) {
  const at::Tensor y = block(x);
  whole(y).square().sum().backward();
  Tensors found{y.detach(), x.grad()};
  for (const auto& [name, slot] : block.named_slots()) {
    found.push_back(slot->get().grad());
  }
  return found;
}

at::Tensor input() {
  return testing::uniform_values({12, kConfig.dim}, 0.2);
}

Tensors step_alone() {
  ConvertedBlock block;
  return step(block, input().requires_grad_(), [](const at::Tensor& y) { return y; });
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).norm().item<double>() / b.norm().item<double>();
}

/// fp32's own error without fp8 is 1e-6; the error of eight bits against fp32 is above 1e-2.
TEST(Fp8UnderTensorParallelism, IsOneRanks) {
  const Tensors expected = step_alone();
  for (const int ranks : {2, 4}) {
    for (const bool regather : {true, false}) {
      RunOnMesh({ranks}, {"tp"}, [&](const DeviceMesh& mesh) {
        ConvertedBlock block;
        parallelize_module(block, mesh, testing::plan_of_block(regather));
        const at::Tensor x =
            distribute_tensor(input(), mesh, {Shard{0}}).tensor().detach().requires_grad_();
        const Tensors found =
            step(block, x, [](const at::Tensor& y) { return DistributedTensor(y).full_tensor(); });
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_LE(relative_error(testing::full_tensor(found[i]), expected[i]), 5e-3) << i;
        }
      });
    }
  }
}

TEST(Fp8UnderTensorParallelism, IsInEightBits) {
  const Tensors expected = step_alone();
  testing::Filled<testing::LlamaBlock> block(kConfig);
  const Tensors found =
      step(block, input().requires_grad_(), [](const at::Tensor& y) { return y; });
  EXPECT_GT(relative_error(found.back(), expected.back()), 1e-2);
  EXPECT_LT(relative_error(found.back(), expected.back()), 1e-1);
}

/// Each of the two heads is computed on two of four ranks.
TEST(Fp8UnderTensorParallelism, ComputesReplicatedHeads) {
  const at::Tensor x = testing::uniform_values({6, 16}, 0.2);
  RunOnMesh({4}, {"tp"}, [&](const DeviceMesh& mesh) {
    testing::Filled<nn::Linear> linear(16, 32, nn::LinearOptions{.bias = false});
    nn::convert_to_fp8(linear);
    const at::Tensor expected = kernels::fp8_linear(x, linear.weight->detach());
    parallelize_module(linear, mesh, {{"", replicated_heads_parallel({.heads = 2})}});
    const at::Tensor y = local_tensor(linear(x));
    EXPECT_TRUE(y.equal(expected.narrow(1, mesh.local_rank() / 2 * 16, 16)));
  });
}

TEST(Fp8UnderTensorParallelism, RefusesToConvertWhatIsDistributed) {
  RunOnMesh({2}, {"tp"}, [](const DeviceMesh& mesh) {
    testing::Filled<nn::Linear> linear(16, 32);
    parallelize_module(linear, mesh, {{"", colwise_parallel()}});
    EXPECT_ERROR(nn::convert_to_fp8(linear), "is distributed already", "before parallelize_module");
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
