#include "device/rotary.h"

#include <gtest/gtest.h>

#include "kernels/device/rounding.h"

namespace tessera::kernels {
namespace {

/// Tables of any numbers: cosines and sines need not fit each other.
struct Tables {
  explicit Tables(const Rotary& call)
      : cos(normals<float>(call.sequence * call.half * 2, 1, 5)),
        sin(normals<float>(call.sequence * call.half * 2, 1, 6)) {}
  std::vector<float> cos, sin;
};

std::int64_t elements_of(const Rotary& call) {
  return call.batch * call.sequence * heads_of_position(call) * call.half * 2;
}

template <class T, int N>
void rotate_all(Rotary call, const Tables& tables) {
  call.cos = tables.cos.data();
  call.sin = tables.sin.data();
  for (std::int64_t position = 0; position < call.batch * call.sequence; ++position) {
    for (int thread = 0; thread < 6; ++thread) {
      rotate_position<T, N>(
          call, position,
          {.first_vector = thread % 2, .vector_step = 2, .first_head = thread / 2, .head_step = 3});
    }
  }
}

/// The heads of one part, dense.
template <class T, int N>
std::vector<T> rotated(Rotary call, const Tables& tables) {
  std::vector<T> out(static_cast<std::size_t>(elements_of(call)));
  RotaryHeads& part = call.parts[0];
  const std::int64_t position = part.heads * 2 * call.half;
  part.out = out.data();
  part.to = {.batch = call.sequence * position, .position = position, .head = 2 * call.half};
  rotate_all<T, N>(call, tables);
  return out;
}

/// One head, against fp64.
template <class T>
void expect_head(const Rotary& call, const T* found, const T* x, const float* cos,
                 const float* sin) {
  for (std::int64_t i = 0; i < call.half; ++i) {
    const double x1 = static_cast<float>(x[i]);
    const double x2 = static_cast<float>(x[call.half + i]);
    const double s1 = sin[i];
    const double s2 = sin[call.half + i];
    expect_rounded_once(found[i], x1 * cos[i] + (call.transposed ? x2 * s2 : -x2 * s1));
    expect_rounded_once(found[call.half + i],
                        x2 * cos[call.half + i] + (call.transposed ? -x1 * s1 : x1 * s2));
  }
}

template <class T, int N>
void expect_rotated(const Rotary& call) {
  const Tables tables(call);
  const std::vector<T> found = rotated<T, N>(call, tables);
  const T* out = found.data();
  for (std::int64_t b = 0; b < call.batch; ++b) {
    for (std::int64_t s = 0; s < call.sequence; ++s) {
      for (std::int64_t h = 0; h < call.parts[0].heads; ++h, out += 2 * call.half) {
        const HeadStrides& from = call.parts[0].from;
        const T* x = static_cast<const T*>(call.parts[0].x) + b * from.batch + s * from.position +
                     h * from.head;
        expect_head(call, out, x, tables.cos.data() + s * 2 * call.half,
                    tables.sin.data() + s * 2 * call.half);
      }
    }
  }
}

/// Two samples of three positions, as a projection leaves them: `apart` elements a position.
Rotary call_of(const void* x, std::int64_t heads, std::int64_t half, std::int64_t apart) {
  Rotary call{.batch = 2, .sequence = 3, .half = half};
  call.parts[0] = {
      .x = x, .from = {.batch = 3 * apart, .position = apart, .head = 2 * half}, .heads = heads};
  return call;
}

TEST_SUITE_OF_ELEMENTS(RotaryOnDevice);

TEST_OF_ELEMENTS(RotaryOnDevice, IsRoundedOnce) {
  const std::vector<T> x = normals<T>(6 * 4 * 64, 2, 1);
  expect_rotated<T, kVector<T>>(call_of(x.data(), 4, 32, 4 * 64));
}

TEST_OF_ELEMENTS(RotaryOnDevice, TransposedIsRoundedOnce) {
  const std::vector<T> x = normals<T>(6 * 4 * 64, 2, 1);
  Rotary call = call_of(x.data(), 4, 32, 4 * 64);
  call.transposed = true;
  expect_rotated<T, kVector<T>>(call);
}

TEST_OF_ELEMENTS(RotaryOnDevice, TakesAPartOfAJointProjection) {
  const std::vector<T> x = normals<T>(6 * 96, 2, 1);
  expect_rotated<T, kVector<T>>(call_of(x.data() + 32, 2, 16, 96));
}

TEST_OF_ELEMENTS(RotaryOnDevice, TakesHalvesThatAreNotAligned) {
  for (const std::int64_t half : {1, 3, 10}) {
    const std::vector<T> x = normals<T>(6 * 3 * 2 * half + 1, 2, 1);
    expect_rotated<T, 1>(call_of(x.data() + 1, 3, half, 3 * 2 * half));
  }
}

TEST_OF_ELEMENTS(RotaryOnDevice, TakesNoPositions) {
  Rotary call = call_of(nullptr, 2, 8, 32);
  call.batch = 0;
  EXPECT_TRUE((rotated<T, kVector<T>>(call, Tables(call)).empty()));
}

TEST_OF_ELEMENTS(RotaryOnDevice, KeepsNaNAndInfinityInTheirPair) {
  for (const float odd : {NAN, INFINITY}) {
    std::vector<T> x(6 * 32, T(1.0F));
    x[1] = static_cast<T>(odd);
    const Rotary call = call_of(x.data(), 1, 16, 32);
    const std::vector<T> found = rotated<T, kVector<T>>(call, Tables(call));
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(std::isfinite(static_cast<float>(found[i])), i != 1 && i != 17) << i;
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
