// What is counted of tensors' memory, and memory that is only reserved.
#include "tessera/observe/tensor_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace tessera::observe {
namespace {

TEST(TensorMemory, CountsLiveBytesAndThePeakSinceTheLastCall) {
  count_tensor_memory();
  const std::int64_t before = *tensor_bytes();
  take_peak_tensor_bytes();
  const at::Tensor kept = at::empty({3});
  at::empty({100});
  EXPECT_EQ(*tensor_bytes() - before, 12);
  EXPECT_EQ(*take_peak_tensor_bytes() - before, 412);
  EXPECT_EQ(*take_peak_tensor_bytes() - before, 12);  // the large one was before
}

TEST(TensorMemory, ReportsEachBlockInMultiplesOfTheGranularity) {
  std::vector<TensorBlock> told;
  count_tensor_memory(
      {.granularity = 512, .observer = [&](const TensorBlock& block) { told.push_back(block); }});
  at::empty({129});
  at::empty({128});
  count_tensor_memory();
  ASSERT_EQ(told.size(), 4U);
  EXPECT_EQ(told[0].bytes, 1024);  // of 516
  EXPECT_EQ(told[2].bytes, 512);
  EXPECT_EQ(told[1].number, told[0].number);
  EXPECT_TRUE(told[1].freed);
  EXPECT_EQ(told[2].number, told[0].number + 1);
}

TEST(TensorMemory, ReservesMoreThanAnyMachineHas) {
  count_tensor_memory({.reserve_only = true});
  const std::int64_t before = *tensor_bytes();
  {
    const at::Tensor large = at::empty({std::int64_t{1} << 38});
    EXPECT_EQ(*tensor_bytes() - before, std::int64_t{1} << 40);
    large[1] = 2;  // memory comes with the first write
    EXPECT_EQ(large[1].item<float>(), 2);
  }
  EXPECT_EQ(*tensor_bytes(), before);
  count_tensor_memory();
}

TEST(TensorMemory, AnEmptyTensorIsNoBlock) {
  std::vector<TensorBlock> told;
  count_tensor_memory({.observer = [&](const TensorBlock& block) { told.push_back(block); }});
  at::zeros({0, 5});
  count_tensor_memory();
  EXPECT_TRUE(told.empty());
}

}  // namespace
}  // namespace tessera::observe
