#include "device/silu_mul.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "kernels/device/rounding.h"

namespace tessera::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double exact_sigmoid(double g) {
  return 1 / (1 + std::exp(-g));
}

/// Three threads a row, so that the last vectors are of several.
template <class T, int N>
std::vector<T> forward(SiluMul call) {
  std::vector<T> out(static_cast<std::size_t>(call.rows * call.size));
  call.out = out.data();
  for (std::int64_t row = 0; row < call.rows; ++row) {
    for (int thread = 0; thread < 3; ++thread) {
      silu_mul_row<T, N>(call, row, thread, 3);
    }
  }
  return out;
}

template <class T>
SiluMul call_of(const std::vector<T>& gate, const std::vector<T>& up) {
  return {.gate = gate.data(),
          .up = up.data(),
          .rows = 1,
          .size = static_cast<std::int64_t>(gate.size())};
}

template <class T>
void expect_forward(const std::vector<T>& out, const T* gate, const T* up) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double g = static_cast<float>(gate[i]);
    expect_rounded_once(out[i], g * exact_sigmoid(g) * static_cast<float>(up[i]));
  }
}

template <class T>
std::string_view bits_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), sizeof(T) * values.size()};
}

template <class T>
struct SiluGradients {
  std::vector<T> gate, up;
};

template <class T, int N>
SiluGradients<T> backward(const SiluMul& in, const std::vector<T>& grad) {
  SiluGradients<T> result{std::vector<T>(grad.size()), std::vector<T>(grad.size())};
  std::vector<T> again(static_cast<std::size_t>(in.rows * in.size));
  SiluMulBackward call{in, grad.data(), result.gate.data(), result.up.data(), in.size, in.size};
  call.forward.out = again.data();
  for (std::int64_t row = 0; row < in.rows; ++row) {
    for (int thread = 0; thread < 3; ++thread) {
      silu_mul_backward_row<T, N>(call, row, thread, 3);
    }
  }
  const std::vector<T> out = forward<T, N>(in);
  EXPECT_EQ(bits_of(again), bits_of(out));  // NaN has bits, too
  return result;
}

template <class T>
void expect_backward(const SiluGradients<T>& found, const std::vector<T>& grad, const T* gate,
                     const T* up) {
  for (std::size_t i = 0; i < grad.size(); ++i) {
    const double g = static_cast<float>(gate[i]);
    const double d = static_cast<float>(grad[i]);
    const double u = static_cast<float>(up[i]);
    const double s = exact_sigmoid(g);
    // 1 and g * (1 - s) cancel where silu has its minimum.
    expect_rounded_once(found.gate[i], d * u * s * (1 + g * (1 - s)), std::abs(d * u * s));
    expect_rounded_once(found.up[i], d * g * s);
  }
}

/// Of 5 rows of 24 gates and 24 ups.
template <class T>
SiluMul halves_of(const std::vector<T>& product) {
  return {.gate = product.data(),
          .up = product.data() + 24,
          .gate_stride = 48,
          .up_stride = 48,
          .rows = 5,
          .size = 24};
}

TEST_SUITE_OF_ELEMENTS(SiluMulOnDevice);

TEST_OF_ELEMENTS(SiluMulOnDevice, IsRoundedOnceForAnySize) {
  for (const std::int64_t size : {0, 1, 7, 8, 9, 31, 1000}) {
    const std::vector<T> gate = normals<T>(size, 4, 1);
    const std::vector<T> up = normals<T>(size, 1, 2);
    expect_forward(forward<T, kVector<T>>(call_of(gate, up)), gate.data(), up.data());
  }
}

TEST_OF_ELEMENTS(SiluMulOnDevice, GradientsAreRoundedOnceForAnySize) {
  for (const std::int64_t size : {0, 1, 7, 8, 9, 31, 1000}) {
    const std::vector<T> gate = normals<T>(size, 4, 1);
    const std::vector<T> up = normals<T>(size, 1, 2);
    const std::vector<T> grad = normals<T>(size, 1, 3);
    expect_backward(backward<T, kVector<T>>(call_of(gate, up), grad), grad, gate.data(), up.data());
  }
}

TEST_OF_ELEMENTS(SiluMulOnDevice, TakesMisalignedInput) {
  const std::vector<T> gate = normals<T>(38, 4, 1);
  const std::vector<T> up = normals<T>(38, 1, 2);
  const std::vector<T> grad = normals<T>(37, 1, 3);
  const SiluMul call{.gate = gate.data() + 1, .up = up.data() + 1, .rows = 1, .size = 37};
  expect_forward(forward<T, 1>(call), gate.data() + 1, up.data() + 1);
  expect_backward(backward<T, 1>(call, grad), grad, gate.data() + 1, up.data() + 1);
}

TEST_OF_ELEMENTS(SiluMulOnDevice, TakesHalvesOfOneProduct) {
  const std::vector<T> product = normals<T>(5 * 48, 2, 1);
  std::vector<T> gate, up;
  for (int row = 0; row < 5; ++row) {
    gate.insert(gate.end(), product.begin() + row * 48, product.begin() + row * 48 + 24);
    up.insert(up.end(), product.begin() + row * 48 + 24, product.begin() + row * 48 + 48);
  }
  const std::vector<T> grad = normals<T>(5 * 24, 1, 3);
  const SiluMul call = halves_of(product);
  expect_forward(forward<T, kVector<T>>(call), gate.data(), up.data());
  expect_backward(backward<T, kVector<T>>(call, grad), grad, gate.data(), up.data());
}

TEST_OF_ELEMENTS(SiluMulOnDevice, WritesTheGradientsIntoHalvesOfOneTensor) {
  const std::vector<T> product = normals<T>(5 * 48, 2, 1);
  const std::vector<T> grad = normals<T>(5 * 24, 1, 3);
  const SiluMul in = halves_of(product);
  const SiluGradients<T> apart = backward<T, kVector<T>>(in, grad);
  std::vector<T> joint(5 * 48);
  const SiluMulBackward call{.forward = in,
                             .grad = grad.data(),
                             .gate_grad = joint.data(),
                             .up_grad = joint.data() + 24,
                             .gate_grad_stride = 48,
                             .up_grad_stride = 48};
  for (std::int64_t row = 0; row < 5; ++row) {
    silu_mul_backward_row<T, kVector<T>>(call, row, 0, 1);
    for (int i = 0; i < 24; ++i) {
      EXPECT_EQ(joint[static_cast<std::size_t>(row * 48 + i)],
                apart.gate[static_cast<std::size_t>(row * 24 + i)]);
      EXPECT_EQ(joint[static_cast<std::size_t>(row * 48 + 24 + i)],
                apart.up[static_cast<std::size_t>(row * 24 + i)]);
    }
  }
}

TEST_OF_ELEMENTS(SiluMulOnDevice, HugeGatesOverflowOnlyWhereTheResultDoes) {
  const auto largest = static_cast<float>(std::numeric_limits<T>::max());
  std::vector<T> gate, up, grad;
  for (const float g : {-largest, -200.0F, -80.0F, -1.278F, 0.0F, 80.0F, 200.0F, largest}) {
    for (const float u : {-largest, -1.0F, 0.0F, 1.0F, largest}) {
      gate.push_back(static_cast<T>(g));
      up.push_back(static_cast<T>(g < -87 ? std::clamp(u, -1.0F, 1.0F) : u));
      grad.push_back(static_cast<T>(0.5F));
    }
  }
  expect_forward(forward<T, kVector<T>>(call_of(gate, up)), gate.data(), up.data());
  expect_backward(backward<T, kVector<T>>(call_of(gate, up), grad), grad, gate.data(), up.data());
}

TEST_OF_ELEMENTS(SiluMulOnDevice, KeepsNaN) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const std::vector<T> a(9, nan), b(9, T(1.0F));
  for (const SiluMul& call : {call_of(a, b), call_of(b, a)}) {
    for (const T value : forward<T, kVector<T>>(call)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(value)));
    }
  }
  const SiluGradients<T> of_nan = backward<T, kVector<T>>(call_of(b, b), a);
  EXPECT_TRUE(std::isnan(static_cast<float>(of_nan.gate[8])));
  EXPECT_TRUE(std::isnan(static_cast<float>(of_nan.up[8])));
}

TEST_OF_ELEMENTS(SiluMulOnDevice, InfiniteGateStaysInfinite) {
  const std::vector<T> gate(9, static_cast<T>(static_cast<float>(kInfinity))), up(9, T(-2.0F));
  EXPECT_EQ(static_cast<float>(forward<T, kVector<T>>(call_of(gate, up))[8]), -kInfinity);
}

}  // namespace
}  // namespace tessera::kernels
