#include "tessera/kernels/detail/pack.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "extents.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {
namespace {

/// The kernel's body on the host, fp32 to bf16, beside what libtorch copies.
void expect_copied(const at::Tensor& from, const at::Tensor& to) {
  const std::optional<PackPiece> piece = pack_piece(from, to);
  ASSERT_TRUE(piece);
  Pack call{};
  ASSERT_TRUE(call.list.add(*piece));
  for (std::int32_t number = 0; number < call.list.chunks; ++number) {
    copy_chunk<float, c10::BFloat16>(call, number, /*first=*/0, /*step=*/1);
  }
  EXPECT_TRUE(to.equal(from.to(at::kBFloat16))) << from.sizes() << from.strides() << to.strides();
}

at::Tensor buffer(at::IntArrayRef sizes) {
  return at::full(sizes, 7, at::kBFloat16);
}

TEST(PackPiece, IsOneRowOfDenseTensors) {
  const at::Tensor from = at::randn({3, 4, 5});
  EXPECT_EQ(pack_piece(from, buffer({3, 4, 5}))->rows, 1);
  expect_copied(from, buffer({3, 4, 5}));
  expect_copied(at::randn({1, 4, 1}), buffer({1, 4, 1}));
  expect_copied(at::randn({}), buffer({}));
}

/// What FSDP copies: the ranks' rows of a tensor between it and a buffer with a row for each rank.
TEST(PackPiece, IsRowsOfABufferOfRanks) {
  const at::Tensor from = at::randn({8, 6, 5});
  const at::Tensor packed = buffer({4, 200});
  expect_copied(from.unflatten(0, {4, 2}), packed.narrow(1, 30, 60).unflatten(1, {2, 6, 5}));
  EXPECT_TRUE(packed.narrow(1, 0, 30).eq(7).all().item<bool>());
  EXPECT_TRUE(packed.narrow(1, 90, 110).eq(7).all().item<bool>());
  // Pieces of columns, and of the parts of a fused weight.
  expect_copied(from.narrow(1, 2, 3), packed.select(0, 1).narrow(0, 7, 120).view({8, 3, 5}));
  expect_copied(from.view({2, 4, 30}).narrow(1, 1, 2),
                packed.select(0, 2).narrow(0, 0, 120).view({2, 2, 30}));
}

TEST(PackPiece, OfOneElementARowWhereNoDimensionIsDense) {
  expect_copied(at::randn({10, 3}).select(1, 1), buffer({10}));
  expect_copied(at::randn({10}), buffer({10, 3}).select(1, 2));
}

TEST(PackPiece, OtherStridesAreNone) {
  EXPECT_FALSE(pack_piece(at::randn({4, 5}).t(), buffer({5, 4})));
  EXPECT_FALSE(pack_piece(at::randn({4, 5, 6}).narrow(1, 0, 3).narrow(2, 0, 3), buffer({4, 3, 3})));
}

TEST(CopyAll, CopiesAnyTypesAndStrides) {
  const std::vector<at::Tensor> from{at::randn({4, 5}).t(), at::randn({7}, at::kDouble),
                                     at::randn({0}), at::randn({3}).to(at::kHalf)};
  const std::vector<at::Tensor> to{buffer({5, 4}), buffer({7}), buffer({0}), buffer({3})};
  copy_all(to, from);
  for (std::size_t i = 0; i < from.size(); ++i) {
    EXPECT_TRUE(to[i].equal(from[i].to(at::kBFloat16))) << i;
  }
  copy_all({}, {});
}

TEST(CopyAll, IsALaunchForEachPairOfTypesOnCuda) {
  std::vector<std::string> names;
  const FakeMode fake(c10::DeviceType::CUDA,
                      [&](const FakeCall& call) { names.push_back(call.name); });
  const at::Tensor wide = at::empty({6, 4});
  const at::Tensor narrow = at::empty({6, 4}, at::kBFloat16);
  names.clear();
  copy_all(std::vector<at::Tensor>(60, narrow), std::vector<at::Tensor>(60, wide));
  EXPECT_EQ(names, (std::vector<std::string>{"tessera::pack"}));
  copy_all({narrow, wide, narrow}, {wide, narrow, wide});
  EXPECT_EQ(names, std::vector<std::string>(3, "tessera::pack"));
  copy_all(std::vector<at::Tensor>(65, narrow), std::vector<at::Tensor>(65, wide));
  EXPECT_EQ(names, std::vector<std::string>(5, "tessera::pack"));
}

TEST(NormOfLists, IsThreeLaunchesOnCuda) {
  std::vector<std::string> names;
  const FakeMode fake(c10::DeviceType::CUDA,
                      [&](const FakeCall& call) { names.push_back(call.name); });
  const std::vector<at::Tensor> gradients(200, at::empty({6, 4}));
  ASSERT_TRUE(has_norm_kernels(gradients, at::kCPU));
  EXPECT_FALSE(has_norm_kernels({at::empty({2}, at::kDouble)}, at::kCPU));
  const auto count = [&](const char* name) { return std::ranges::count(names, name); };
  clip_norm_on_cuda(squares_on_cuda(gradients, {}, {}, at::kCPU), 1.0);
  EXPECT_EQ(count("tessera::square_sums"), 1);
  EXPECT_EQ(count("tessera::sum_kinds"), 1);
  EXPECT_EQ(count("tessera::clip_norm"), 1);
}

TEST(NormOfLists, IsNotForACpu) {
  EXPECT_FALSE(has_norm_kernels({at::empty({2})}, at::kCPU));
  EXPECT_FALSE(has_norm_kernels({}, at::kCPU));
}

}  // namespace
}  // namespace tessera::kernels
