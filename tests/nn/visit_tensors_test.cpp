#include "tessera/nn/visit_tensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace user {

struct Batch {
  at::Tensor tokens;
  std::optional<at::Tensor> mask;
  int count = 0;
};

template <class Visit>
void visit_tensors(Batch& batch, Visit&& visit) {
  visit(batch.tokens);
  tessera::nn::visit_tensors(batch.mask, visit);
}

}  // namespace user

namespace tessera::nn {
namespace {

at::Tensor number(int i) {
  return at::scalar_tensor(i);
}

template <class T>
std::vector<int> numbers(T value) {
  std::vector<int> found;
  for (const at::Tensor* tensor : collect_tensors(value)) {
    found.push_back(tensor->item<int>());
  }
  return found;
}

using Ints = std::vector<int>;

TEST(VisitTensors, FindsATensor) {
  EXPECT_EQ(numbers(number(1)), Ints{1});
}

TEST(VisitTensors, FindsThoseInTuplesAndPairs) {
  EXPECT_EQ(numbers(std::tuple(number(1), 7, std::pair(number(2), number(3)))), (Ints{1, 2, 3}));
}

TEST(VisitTensors, FindsThoseInSequences) {
  EXPECT_EQ(numbers(std::vector{number(1), number(2)}), (Ints{1, 2}));
  EXPECT_EQ(numbers(std::array{number(3), number(4)}), (Ints{3, 4}));
}

TEST(VisitTensors, FindsThoseInOptionalsAndMaps) {
  EXPECT_EQ(numbers(std::optional(number(1))), Ints{1});
  EXPECT_EQ(numbers(std::optional<at::Tensor>()), Ints{});
  EXPECT_EQ(numbers(std::map<std::string, at::Tensor>{{"b", number(2)}, {"a", number(1)}}),
            (Ints{1, 2}));
}

TEST(VisitTensors, FindsNoneInOtherTypes) {
  EXPECT_EQ(numbers(3), Ints{});
  EXPECT_EQ(numbers(std::string("x")), Ints{});
  EXPECT_EQ(numbers(std::vector<bool>{true}), Ints{});
}

TEST(VisitTensors, CallsAUsersOverload) {
  EXPECT_EQ(numbers(user::Batch{number(1), number(2)}), (Ints{1, 2}));
  EXPECT_EQ(numbers(std::vector{user::Batch{number(1), {}}, user::Batch{number(2), number(3)}}),
            (Ints{1, 2, 3}));
}

TEST(VisitTensors, ReplacesInPlace) {
  auto value = std::tuple(number(1), std::vector{number(2)});
  for (at::Tensor* tensor : collect_tensors(value)) {
    *tensor = *tensor * 10;
  }
  EXPECT_EQ(numbers(value), (Ints{10, 20}));
}

TEST(VisitTensors, VisitsUndefinedTensorsToo) {
  std::tuple<at::Tensor, at::Tensor> value{at::Tensor(), number(1)};
  EXPECT_EQ(collect_tensors(value).size(), 2U);
}

}  // namespace
}  // namespace tessera::nn
