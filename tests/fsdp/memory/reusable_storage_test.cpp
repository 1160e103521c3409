#include "fsdp/buffers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace tessera::fsdp {
namespace {

void refill(const at::Tensor& tensor, double value) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  tensor.fill_(value);
}

TEST(ReusableStorage, LetsBackwardReadWhatItWasRefilledWith) {
  ReusableStorage storage(3 * sizeof(float), c10::kCPU);
  const at::Tensor weight = storage.tensor({3}, at::kFloat, 0).requires_grad_();
  storage.allocate();
  refill(weight, 2);
  const at::Tensor x = at::ones({3}).requires_grad_();
  const at::Tensor y = x.mul(weight).sum();
  storage.free();
  storage.allocate();
  refill(weight, 5);
  y.backward();
  EXPECT_TRUE(x.grad().equal(at::full({3}, 5.0)));
}

TEST(ReusableStorage, FreesItsMemory) {
  ReusableStorage storage(64, c10::kCPU);
  const at::Tensor tensor = storage.tensor({16}, at::kFloat, 0);
  EXPECT_FALSE(storage.allocated());
  storage.allocate();
  EXPECT_EQ(tensor.storage().nbytes(), 64u);
  storage.free();
  EXPECT_EQ(tensor.storage().nbytes(), 0u);
  EXPECT_FALSE(storage.allocated());
}

TEST(ReusableStorage, PlacesTensorsAtTheirOffsets) {
  ReusableStorage storage(6 * sizeof(float), c10::kCPU);
  const at::Tensor first = storage.tensor({2}, at::kFloat, 0);
  const at::Tensor second = storage.tensor({2, 2}, at::kFloat, 2 * sizeof(float));
  storage.allocate();
  refill(first, 1);
  refill(second, 2);
  EXPECT_TRUE(first.equal(at::full({2}, 1.0)));
  EXPECT_TRUE(second.equal(at::full({2, 2}, 2.0)));
}

}  // namespace
}  // namespace tessera::fsdp
