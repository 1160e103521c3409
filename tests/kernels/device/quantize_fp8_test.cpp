#include "device/quantize_fp8.h"

#include <gtest/gtest.h>

#include "kernels/device/one_thread.h"
#include "kernels/device/rounding.h"
#include "tessera/kernels/detail/fp8.h"

#include <ATen/ATen.h>

namespace tessera::kernels {
namespace {

struct Result {
  std::vector<std::uint8_t> values;
  std::vector<float> scales;
};

template <class T, int N>
Result by_rows(QuantizeFp8 call) {
  Result result{std::vector<std::uint8_t>(static_cast<std::size_t>(call.rows * call.columns)),
                std::vector<float>(static_cast<std::size_t>(call.rows))};
  call.values = result.values.data();
  call.scales = result.scales.data();
  OneThread team;
  for (std::int64_t row = 0; row < call.rows; ++row) {
    quantize_fp8_row<T, N>(call, row, team);
  }
  return result;
}

/// `x` with the rows' elements multiplied by the factors, as the operators of libtorch quantise it:
/// those are held against fp64 and the list of the format's values (fp8_test.cpp).
void expect_as_composed(const Result& found, const at::Tensor& x) {
  const Fp8Rows expected = quantize_fp8(x);
  const at::Tensor codes = expected.values.view(at::kByte);
  for (std::int64_t row = 0; row < x.size(0); ++row) {
    const auto at_row = static_cast<std::size_t>(row);
    EXPECT_EQ(found.scales[at_row], expected.scales[row].item<float>());
    for (std::int64_t column = 0; column < x.size(1); ++column) {
      const auto code = codes[row][column].item<std::uint8_t>();
      const std::uint8_t mine = found.values[at_row * static_cast<std::size_t>(x.size(1)) +
                                             static_cast<std::size_t>(column)];
      // The sign of a NaN is any.
      EXPECT_TRUE(mine == code || ((mine & 0x7F) == 0x7F && (code & 0x7F) == 0x7F))
          << "row " << row << ", column " << column << ": " << int(mine) << ", " << int(code);
    }
  }
}

template <class T>
at::Tensor as_tensor(const std::vector<T>& x, std::int64_t rows) {
  return at::from_blob(const_cast<T*>(x.data()), {rows, static_cast<std::int64_t>(x.size()) / rows},
                       c10::CppTypeToScalarType<T>::value);
}

template <class T>
QuantizeFp8 call_of(const at::Tensor& x) {
  return {.x = x.const_data_ptr(), .stride = x.stride(0), .rows = x.size(0), .columns = x.size(1)};
}

TEST_SUITE_OF_ELEMENTS(QuantizeFp8OnDevice);

TEST_OF_ELEMENTS(QuantizeFp8OnDevice, IsThatOfTheComposedOperatorsForAnySize) {
  for (const auto& [rows, columns] :
       {std::pair(3, 64), {2, 1}, {5, 37}, {1, 8}, {33, 16}, {130, 72}}) {
    for (const double scale : {1.0, 1e-3, 1e4}) {
      const std::vector<T> values = normals<T>(rows * columns, scale, 7);
      const at::Tensor x = as_tensor(values, rows);
      expect_as_composed(by_rows<T, 1>(call_of<T>(x)), x);
      if (columns % kVector<T> == 0) {
        expect_as_composed(by_rows<T, kVector<T>>(call_of<T>(x)), x);
      }
    }
  }
}

TEST_OF_ELEMENTS(QuantizeFp8OnDevice, ReadsRowsThatAreApart) {
  const std::vector<T> values = normals<T>(4 * 48, 1, 3);
  const at::Tensor x = as_tensor(values, 4).narrow(1, 16, 16);
  expect_as_composed(by_rows<T, kVector<T>>(call_of<T>(x)), x);
}

TEST_OF_ELEMENTS(QuantizeFp8OnDevice, MultipliesColumnsByFactors) {
  const std::vector<T> values = normals<T>(3 * 32, 1, 5);
  std::vector<float> factors;
  for (int i = 0; i < 32; ++i) {
    factors.push_back(std::ldexp(1.0F, i % 7 - 3));
  }
  const at::Tensor x = as_tensor(values, 3);
  const at::Tensor product = x * as_tensor(factors, 1).to(x.scalar_type());
  QuantizeFp8 call = call_of<T>(x);
  call.factors = factors.data();
  expect_as_composed(by_rows<T, kVector<T>>(call), product);
  expect_as_composed(by_rows<T, 1>(call), product);
}

TEST_OF_ELEMENTS(QuantizeFp8OnDevice, KeepsZerosAndMakesRowsThatAreNotFiniteNaN) {
  using Limits = std::numeric_limits<T>;
  const std::vector<T> values{T(0.0F),
                              T(-0.0F),
                              T(1.0F),
                              Limits::infinity(),
                              T(2.0F),
                              -Limits::infinity(),
                              Limits::quiet_NaN(),
                              T(1.0F),
                              Limits::max(),
                              T(1.0F),
                              Limits::denorm_min(),
                              T(0.0F)};
  const at::Tensor x = as_tensor(values, 6);
  expect_as_composed(by_rows<T, 1>(call_of<T>(x)), x);
}

}  // namespace
}  // namespace tessera::kernels
