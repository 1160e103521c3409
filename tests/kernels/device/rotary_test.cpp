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

template <class T>
class RotaryOnDevice : public ::testing::Test {};
TYPED_TEST_SUITE(RotaryOnDevice, Elements);

TYPED_TEST(RotaryOnDevice, IsRoundedOnce) {
  using T = TypeParam;
  const std::vector<T> x = normals<T>(6 * 4 * 64, 2, 1);
  expect_rotated<T, kVector<T>>(call_of(x.data(), 4, 32, 4 * 64));
}

TYPED_TEST(RotaryOnDevice, TransposedIsRoundedOnce) {
  using T = TypeParam;
  const std::vector<T> x = normals<T>(6 * 4 * 64, 2, 1);
  Rotary call = call_of(x.data(), 4, 32, 4 * 64);
  call.transposed = true;
  expect_rotated<T, kVector<T>>(call);
}

TYPED_TEST(RotaryOnDevice, TakesAPartOfAJointProjection) {
  using T = TypeParam;
  const std::vector<T> x = normals<T>(6 * 96, 2, 1);
  expect_rotated<T, kVector<T>>(call_of(x.data() + 32, 2, 16, 96));
}

TYPED_TEST(RotaryOnDevice, TakesHalvesThatAreNotAligned) {
  using T = TypeParam;
  for (const std::int64_t half : {1, 3, 10}) {
    const std::vector<T> x = normals<T>(6 * 3 * 2 * half + 1, 2, 1);
    expect_rotated<T, 1>(call_of(x.data() + 1, 3, half, 3 * 2 * half));
  }
}

TYPED_TEST(RotaryOnDevice, TakesNoPositions) {
  using T = TypeParam;
  Rotary call = call_of(nullptr, 2, 8, 32);
  call.batch = 0;
  EXPECT_TRUE((rotated<T, kVector<T>>(call, Tables(call)).empty()));
}

/// Groups of two query heads, a key and a value head, as strides of one product.
template <class T>
struct Product {
  explicit Product(T* data) : data(data) {}
  static constexpr std::int64_t kGroups = 2, kHead = 16, kGroup = 4 * kHead,
                                kPosition = kGroups * kGroup, kSize = 6 * kPosition;

  /// Heads from `first` on of each group.
  T* at(std::int64_t first) const { return data + first * kHead; }
  static HeadStrides strides() {
    return {.batch = 3 * kPosition, .position = kPosition, .group = kGroup, .head = kHead};
  }
  T* data;
};

/// Dense heads, `heads` in each of the two groups.
inline HeadStrides dense_strides(std::int64_t heads) {
  const std::int64_t group = heads * 16;
  return {.batch = 6 * group, .position = 2 * group, .group = group, .head = 16};
}

template <class T>
RotaryHeads from_product(const std::vector<T>& product, std::vector<T>& out, std::int64_t first,
                         std::int64_t heads, bool turned) {
  const Product<const T> from(product.data());
  return {.x = from.at(first),
          .out = out.data(),
          .from = Product<T>::strides(),
          .to = dense_strides(heads),
          .groups = 2,
          .heads = heads,
          .turned = turned};
}

TYPED_TEST(RotaryOnDevice, TakesAllPartsOfAProductAtOnce) {
  using T = TypeParam;
  const std::vector<T> product = normals<T>(Product<T>::kSize, 2, 1);
  std::vector<T> q(6 * 4 * 16), k(6 * 2 * 16), v(6 * 2 * 16);
  Rotary call{.batch = 2, .sequence = 3, .half = 8};
  call.parts[0] = from_product(product, q, 0, 2, true);
  call.parts[1] = from_product(product, k, 2, 1, true);
  call.parts[2] = from_product(product, v, 3, 1, false);
  const Tables tables(call);
  rotate_all<T, kVector<T>>(call, tables);
  for (std::int64_t position = 0; position < 6; ++position) {
    const float* cos = tables.cos.data() + position % 3 * 16;
    const float* sin = tables.sin.data() + position % 3 * 16;
    for (std::int64_t group = 0; group < 2; ++group) {
      const T* x = product.data() + position * Product<T>::kPosition + group * Product<T>::kGroup;
      for (std::int64_t head = 0; head < 2; ++head) {
        expect_head(call, q.data() + ((position * 2 + group) * 2 + head) * 16, x + head * 16, cos,
                    sin);
      }
      const std::int64_t row = (position * 2 + group) * 16;
      expect_head(call, k.data() + row, x + 32, cos, sin);
      EXPECT_TRUE(std::equal(x + 48, x + 64, v.data() + row));
    }
  }
}

TYPED_TEST(RotaryOnDevice, WritesGradientsIntoOneProduct) {
  using T = TypeParam;
  std::vector<T> product(Product<T>::kSize);
  const Product<T> to(product.data());
  std::vector<std::vector<T>> grads;
  Rotary call{.batch = 2, .sequence = 3, .half = 8, .transposed = true};
  for (const std::int64_t part : {0, 1, 2}) {
    const std::int64_t heads = part == 0 ? 2 : 1;
    grads.push_back(normals<T>(6 * 2 * heads * 16, 2, static_cast<int>(part) + 1));
    call.parts[part] = {.x = grads.back().data(),
                        .out = to.at(part == 0 ? 0 : part + 1),
                        .from = dense_strides(heads),
                        .to = Product<T>::strides(),
                        .groups = 2,
                        .heads = heads,
                        .turned = part < 2};
  }
  const Tables tables(call);
  rotate_all<T, 1>(call, tables);
  for (std::int64_t row = 0; row < 12; ++row) {  // positions and their groups
    const float* cos = tables.cos.data() + row / 2 % 3 * 16;
    const float* sin = tables.sin.data() + row / 2 % 3 * 16;
    const T* out = product.data() + row * Product<T>::kGroup;
    expect_head(call, out, grads[0].data() + row * 32, cos, sin);
    expect_head(call, out + 16, grads[0].data() + row * 32 + 16, cos, sin);
    expect_head(call, out + 32, grads[1].data() + row * 16, cos, sin);
    EXPECT_TRUE(std::equal(out + 48, out + 64, grads[2].data() + row * 16));
  }
}

TYPED_TEST(RotaryOnDevice, KeepsNaNAndInfinityInTheirPair) {
  using T = TypeParam;
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
