#pragma once

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "testing/values.h"

namespace tessera::testing {

/// Whether two tensors have equal values. Collective if one is distributed: whole values are
/// compared.
inline ::testing::AssertionResult Equal(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor a = full_tensor(found), b = full_tensor(expected);
  if (at::equal(a, b)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << a << "\nexpected\n" << b << "\n";
}

/// The same with at::allclose().
inline ::testing::AssertionResult Close(const at::Tensor& found, const at::Tensor& expected,
                                        double relative = 1e-5, double absolute = 1e-8,
                                        bool equal_nan = false) {
  const at::Tensor a = full_tensor(found), b = full_tensor(expected);
  if (at::allclose(a, b, relative, absolute, equal_nan)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << a << "\nexpected\n" << b << "\n";
}

}  // namespace tessera::testing

// A message may be streamed into these.
#define EXPECT_EQUAL(...) EXPECT_TRUE(::tessera::testing::Equal(__VA_ARGS__))
#define EXPECT_CLOSE(...) EXPECT_TRUE(::tessera::testing::Close(__VA_ARGS__))
