// Canary (fails if libtorch changes): autograd calls the engine that the library has installed. A
// process has one engine, so this test is a separate program.

#include "tessera/internals/detail/graph.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <vector>

namespace tessera::detail {
namespace {

int packed = 0;
int unpacked = 0;
bool packs = false;
std::vector<BackwardCall> calls;

class Counted final : public SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    ++packed;
    tensor_ = tensor.detach();
  }
  at::Tensor call_unpack_hook() override {
    ++unpacked;
    return tensor_;
  }

 private:
  at::Tensor tensor_;
};

std::unique_ptr<SavedVariableHooks> hooks() {
  return packs ? std::make_unique<Counted>() : nullptr;
}

variable_list execute(const BackwardCall& call, const RunBackward& run) {
  calls.push_back(call);
  return run(call);
}

class EngineCanary : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(install_engine({.hooks = &hooks, .execute = &execute}));
    packed = unpacked = 0;
    calls.clear();
  }
};

TEST_F(EngineCanary, PacksAndUnpacksSavedTensors) {
  const at::Tensor x = at::full({2}, 3.0).requires_grad_();
  packs = true;
  const at::Tensor loss = x.exp().sum();
  packs = false;
  EXPECT_EQ(packed, 1);
  loss.backward();
  EXPECT_EQ(unpacked, 1);
  EXPECT_TRUE(at::equal(x.grad(), x.exp()));
}

TEST_F(EngineCanary, ReceivesTheOutputsOfAutogradGrad) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor unused = at::ones({2}).requires_grad_();
  const auto gradients = torch::autograd::grad({(x * 2).sum()}, {x, unused}, /*grad_outputs=*/{},
                                               /*retain_graph=*/std::nullopt,
                                               /*create_graph=*/false, /*allow_unused=*/true);
  ASSERT_EQ(calls.size(), 1u);
  ASSERT_EQ(calls[0].outputs.size(), 2u);
  EXPECT_TRUE(as_leaf(calls[0].outputs[0])->variable.is_same(x));
  EXPECT_TRUE(is_unreachable(calls[0].outputs[1]));
  EXPECT_FALSE(calls[0].accumulate);
  EXPECT_TRUE(at::equal(gradients[0], at::full({2}, 2.0)));
  EXPECT_FALSE(gradients[1].defined());
}

TEST_F(EngineCanary, LeavesBackwardUnchanged) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  (x * 2).sum().backward();
  EXPECT_TRUE(calls.empty());
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 2.0)));
}

}  // namespace
}  // namespace tessera::detail
