#include "tessera/kernels/detail/tensors_in_values.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace tessera::kernels {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

/// A number, and tensors with the values 1 to 4 in each way that a schema has them.
std::vector<c10::IValue> values() {
  const auto tensor = [](int value) { return at::full({}, value); };
  return {tensor(1), 7, at::Tensor(), c10::List<at::Tensor>({tensor(2), at::Tensor(), tensor(3)}),
          c10::List<OptionalTensor>({std::nullopt, OptionalTensor(tensor(4))})};
}

std::vector<double> numbers_in(const std::vector<c10::IValue>& all) {
  std::vector<double> numbers;
  visit_tensors(all, [&](const at::Tensor& tensor) { numbers.push_back(tensor.item<double>()); });
  return numbers;
}

TEST(TensorsInValues, AreVisitedInOrderWithoutUndefinedOnes) {
  EXPECT_EQ(numbers_in(values()), (std::vector<double>{1, 2, 3, 4}));
}

TEST(TensorsInValues, AreReplacedAndAllElseStays) {
  std::vector<c10::IValue> replaced;
  for (const c10::IValue& value : values()) {
    replaced.push_back(with_tensors(value, [](const at::Tensor& tensor) { return tensor.mul(2); }));
  }
  EXPECT_EQ(numbers_in(replaced), (std::vector<double>{2, 4, 6, 8}));
  EXPECT_EQ(replaced[1].toInt(), 7);
  EXPECT_FALSE(replaced[2].toTensor().defined());
  EXPECT_FALSE(replaced[3].toTensorVector()[1].defined());
  EXPECT_FALSE(replaced[4].toOptionalTensorVector()[0].has_value());
}

}  // namespace
}  // namespace tessera::kernels
