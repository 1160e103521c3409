#include "tessera/kernels/detail/lists.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "device/lists.h"
#include "extents.h"
#include "kernels/host_kernels.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {
namespace {

/// pack_piece() and the CUDA kernel's body must both round fp32 to bf16 as libtorch does.
void expect_copied(const at::Tensor& from, const at::Tensor& to) {
  EXPECT_TRUE(pack_piece(from, to));
  {
    const KernelsOnHost kernels;
    copy_all({to}, {from});
  }
  EXPECT_TRUE(to.equal(from.to(at::kBFloat16))) << from.sizes() << from.strides() << to.strides();
}

at::Tensor buffer(at::IntArrayRef sizes) {
  return at::full(sizes, 7, at::kBFloat16);
}

TEST(PackPiece, OfDenseTensorsIsOneRow) {
  const at::Tensor from = at::randn({3, 4, 5});
  EXPECT_EQ(pack_piece(from, buffer({3, 4, 5}))->rows, 1);
  expect_copied(from, buffer({3, 4, 5}));
  expect_copied(at::randn({1, 4, 1}), buffer({1, 4, 1}));
  expect_copied(at::randn({}), buffer({}));
}

/// FSDP's buffer has a row per rank. A piece is the part of a tensor that belongs to one row.
TEST(PackPiece, CopiesIntoRowsOfAnFsdpBuffer) {
  const at::Tensor from = at::randn({8, 6, 5});
  const at::Tensor packed = buffer({4, 200});
  expect_copied(from.unflatten(0, {4, 2}), packed.narrow(1, 30, 60).unflatten(1, {2, 6, 5}));
  EXPECT_TRUE(packed.narrow(1, 0, 30).eq(7).all().item<bool>());
  EXPECT_TRUE(packed.narrow(1, 90, 110).eq(7).all().item<bool>());
  // Pieces of a column shard are blocks of columns. Pieces of a fused weight are rows of two parts.
  expect_copied(from.narrow(1, 2, 3), packed.select(0, 1).narrow(0, 7, 120).view({8, 3, 5}));
  expect_copied(from.view({2, 4, 30}).narrow(1, 1, 2),
                packed.select(0, 2).narrow(0, 0, 120).view({2, 2, 30}));
}

TEST(PackPiece, CopiesStridedVectors) {
  expect_copied(at::randn({10, 3}).select(1, 1), buffer({10}));
  expect_copied(at::randn({10}), buffer({10, 3}).select(1, 2));
}

TEST(PackPiece, IsAbsentForOtherStrides) {
  EXPECT_FALSE(pack_piece(at::randn({4, 5}).t(), buffer({5, 4})));
  EXPECT_FALSE(pack_piece(at::randn({4, 5, 6}).narrow(1, 0, 3).narrow(2, 0, 3), buffer({4, 3, 3})));
}

TEST(CopyAll, CopiesAnyDtypesAndStrides) {
  const std::vector<at::Tensor> from{at::randn({4, 5}).t(), at::randn({7}, at::kDouble),
                                     at::randn({0}), at::randn({3}).to(at::kHalf)};
  const std::vector<at::Tensor> to{buffer({5, 4}), buffer({7}), buffer({0}), buffer({3})};
  copy_all(to, from);
  for (std::size_t i = 0; i < from.size(); ++i) {
    EXPECT_TRUE(to[i].equal(from[i].to(at::kBFloat16))) << i;
  }
  copy_all({}, {});
}

TEST(CopyAll, MatchesLibtorchOnDevice) {
  for (const auto from_type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto to_type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      std::vector<at::Tensor> from, to, rooms;
      for (const std::int64_t size : {1, 7, 8, 9, 16384, 16385, 40000}) {
        from.push_back(at::randn({size}).mul(100).to(from_type));
        to.push_back(at::empty({size}, to_type));
      }
      from[3][0].fill_(INFINITY);
      from[3][8].fill_(NAN);
      const at::Tensor rows = at::randn({4, 24}).to(from_type);
      for (const std::int64_t apart : {24, 32, 27}) {
        rooms.push_back(at::full({4, apart}, 7, to_type));
        from.push_back(rows);
        to.push_back(rooms.back().narrow(1, 0, 24));
      }
      from.push_back(rows.flatten().narrow(0, 1, 37));
      to.push_back(at::empty({38}, to_type).narrow(0, 1, 37));
      {
        const KernelsOnHost kernels;
        copy_all(to, from);
      }
      for (std::size_t i = 0; i < from.size(); ++i) {
        EXPECT_TRUE(to[i]
                        .to(at::kDouble)
                        .allclose(from[i].to(to_type).to(at::kDouble), 0, 0,
                                  /*equal_nan=*/true))
            << i << from_type << to_type;
      }
      for (const at::Tensor& room : rooms) {
        EXPECT_TRUE(room.narrow(1, 24, room.size(1) - 24).eq(7).all().item<bool>());
      }
    }
  }
}

TEST(Chunks, CoverEveryElementOnce) {
  Chunked<PackPiece, 64, 10> list{};
  const std::vector<std::int64_t> sizes{10, 1, 25, 9, 31};
  for (const std::int64_t size : sizes) {
    ASSERT_TRUE(list.add({.rows = 1, .size = size}));
  }
  std::vector<std::int64_t> next(sizes.size(), 0);
  for (std::int32_t number = 0; number < list.chunks; ++number) {
    const Chunk chunk = chunk_of(list, number);
    EXPECT_EQ(chunk.begin, next[static_cast<std::size_t>(chunk.piece)]);
    next[static_cast<std::size_t>(chunk.piece)] = chunk.end;
  }
  EXPECT_EQ(next, sizes);
  static_assert(sizeof(Pack) <= 4096 && sizeof(SquareSums) <= 4096);
}

TEST(CopyAll, LaunchesOneKernelPerDtypePairOnCuda) {
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

double exact_squares(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const at::Tensor& tensor : tensors) {
    sum += tensor.to(at::kDouble).square().sum().item<double>();
  }
  return sum;
}

TEST(NormOfLists, CountsAllElementsOnDevice) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    std::vector<at::Tensor> owned, plain;
    for (const std::int64_t size : {1, 7, 8, 9, 65536, 65537, 200000}) {
      plain.push_back(at::randn({size + 1}).mul(3).to(type));
      owned.push_back(plain.back().narrow(0, size % 2, size));
    }
    const KernelsOnHost kernels;
    const at::Tensor squares = squares_on_cuda(owned, plain, {}, at::kCPU);
    const double of_owned = exact_squares(owned), of_plain = exact_squares(plain);
    EXPECT_NEAR(squares[0].item<double>(), of_owned, 1e-11 * of_owned);
    EXPECT_NEAR(squares[1].item<double>(), of_plain, 1e-11 * of_plain);
    const NormAndFactor found = clip_norm_on_cuda(squares, 2.0);
    const double norm = std::sqrt(of_owned + of_plain);
    EXPECT_NEAR(found.norm.item<double>(), norm, 1e-11 * norm);
    EXPECT_NEAR(found.factor.item<double>(), 2 / (norm + 1e-6), 1e-10);
    EXPECT_EQ(found.of_step.item<double>(), found.factor.item<double>());
    EXPECT_EQ(found.rounded.item<float>(), static_cast<float>(found.norm.item<double>()));
    EXPECT_EQ(clip_norm_on_cuda(squares, 1e9).factor.item<double>(), 1);
  }
}

TEST(NormOfLists, PropagatesNonfiniteNumbersOnDevice) {
  const KernelsOnHost kernels;
  const at::Tensor x = at::ones({9});
  const auto squares = [](const at::Tensor& owned, const at::Tensor& plain,
                          const at::Tensor& copy) {
    const at::Tensor found = squares_on_cuda({owned}, {plain}, {copy}, at::kCPU);
    return std::pair(found[0].item<double>(), found[1].item<double>());
  };
  const at::Tensor infinite = at::full({9}, INFINITY), nan = at::full({9}, NAN);
  EXPECT_EQ(squares(x, x, x), std::pair(9.0, 9.0));
  EXPECT_EQ(squares(x, x, infinite), std::pair(HUGE_VAL, 9.0));
  EXPECT_EQ(squares(x, infinite, x), std::pair(HUGE_VAL, HUGE_VAL));
  EXPECT_TRUE(std::isnan(squares(x, x, nan).first));
  EXPECT_EQ(squares(at::full({9}, 3e38), x, x).first, exact_squares({at::full({9}, 3e38)}));
  EXPECT_TRUE(squares_on_cuda({}, {}, {}, at::kCPU).eq(0).all().item<bool>());
  const NormAndFactor clipped = clip_norm_on_cuda(at::tensor({HUGE_VAL, 0.0}, at::kDouble), 1);
  EXPECT_EQ(clipped.factor.item<double>(), 0);
  EXPECT_TRUE(clipped.of_step.isnan().item<bool>());
  EXPECT_TRUE(
      clip_norm_on_cuda(at::tensor({NAN, 0.0}, at::kDouble), 1).factor.isnan().item<bool>());
}

TEST(NormOfLists, LaunchesThreeKernelsOnCuda) {
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

}  // namespace
}  // namespace tessera::kernels
