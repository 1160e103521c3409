#include "device/embedding.h"

#include <gtest/gtest.h>

#include <numeric>

#include "kernels/device/rounding.h"

namespace tessera::kernels {
namespace {

/// `count` indices below `rows`, of which low ones are frequent.
std::vector<std::int64_t> some_indices(std::int64_t count, std::int64_t rows) {
  std::mt19937 engine(7);
  std::vector<std::int64_t> indices(static_cast<std::size_t>(count));
  std::ranges::generate(indices, [&] {
    const auto bits = static_cast<std::int64_t>(engine());
    return bits % 3 == 0 ? 0 : bits / 3 % rows;
  });
  return indices;
}

/// Sorted as at::sort does it, stably.
struct Sorted {
  explicit Sorted(const std::vector<std::int64_t>& unsorted) : positions(unsorted.size()) {
    std::iota(positions.begin(), positions.end(), 0);
    std::ranges::stable_sort(positions, {}, [&](std::int64_t position) {
      return unsorted[static_cast<std::size_t>(position)];
    });
    for (const std::int64_t position : positions) {
      indices.push_back(unsorted[static_cast<std::size_t>(position)]);
    }
  }
  std::vector<std::int64_t> indices, positions;
};

template <class T, int N>
std::vector<T> backward(const std::vector<std::int64_t>& indices, const std::vector<T>& grad,
                        std::int64_t first_row, std::int64_t rows, std::int64_t size) {
  const Sorted sorted(indices);
  const auto count = static_cast<std::int64_t>(indices.size());
  const std::int64_t tiles = embedding_tiles(count);
  std::vector<T> result(static_cast<std::size_t>(rows * size), T(0.0F));
  // What no tile writes is not read.
  std::vector<float> partial(static_cast<std::size_t>(tiles * 2 * size), NAN);
  const EmbeddingBackward call{.grad = grad.data(),
                               .indices = sorted.indices.data(),
                               .positions = sorted.positions.data(),
                               .count = count,
                               .first_row = first_row,
                               .rows = rows,
                               .size = size,
                               .weight_grad = result.data(),
                               .partial = partial.data()};
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    for (std::int64_t i = 0; i < size; i += N) {
      embedding_backward_tile<T, N>(call, tile, i);
    }
  }
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    for (std::int64_t i = 0; i < size; i += N) {
      embedding_backward_row<T, N>(call, tile, i);
    }
  }
  return result;
}

template <class T>
void expect_backward(const std::vector<T>& found, const std::vector<std::int64_t>& indices,
                     const std::vector<T>& grad, std::int64_t first_row, std::int64_t size) {
  std::vector<double> sums(found.size()), terms(found.size());
  for (std::size_t position = 0; position < indices.size(); ++position) {
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t at = (indices[position] - first_row) * size + i;
      if (at >= 0 && at < static_cast<std::int64_t>(found.size())) {
        const double term = static_cast<float>(
            grad[position * static_cast<std::size_t>(size) + static_cast<std::size_t>(i)]);
        sums[static_cast<std::size_t>(at)] += term;
        terms[static_cast<std::size_t>(at)] += std::abs(term);
      }
    }
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    expect_rounded_once(found[i], sums[i], terms[i]);
  }
}

TEST_SUITE_OF_ELEMENTS(EmbeddingOnDevice);

TEST_OF_ELEMENTS(EmbeddingOnDevice, CopiesRowsAsBitsAndZerosOtherRanks) {
  for (const std::int64_t size : {16, 24}) {
    std::vector<T> table = normals<T>(11 * size, 1, 1);
    table[3] = std::numeric_limits<T>::signaling_NaN();
    const std::vector<std::int64_t> indices{0, 10, 3, 3, 7, 1};
    for (const auto& [first_row, rows] :
         {std::pair<std::int64_t, std::int64_t>{0, 11}, {3, 5}, {11, 0}}) {
      const T* const part = rows == 0 ? nullptr : table.data() + first_row * size;
      const auto values = indices.size() * static_cast<std::size_t>(size);
      std::vector<T> by_vectors(values, T(9.0F)), by_elements(values, T(9.0F));
      Embedding call{.table = part,
                     .indices = indices.data(),
                     .count = 6,
                     .first_row = first_row,
                     .rows = rows,
                     .total_rows = 11,
                     .size = size};
      for (std::int64_t i = 0; i < call.count; ++i) {
        for (int thread = 0; thread < 3; ++thread) {
          call.out = by_vectors.data();
          embedding_row<T, kVector<T>>(call, i, thread, 3);
          call.out = by_elements.data();
          embedding_row<T, 1>(call, i, thread, 3);
        }
      }
      for (std::size_t i = 0; i < indices.size(); ++i) {
        const bool is_here = indices[i] >= first_row && indices[i] < first_row + rows;
        const std::vector<T> zeros(static_cast<std::size_t>(size), T(0.0F));
        const T* const expected = is_here ? table.data() + indices[i] * size : zeros.data();
        const auto bytes = static_cast<std::size_t>(size) * sizeof(T);
        const auto at = i * static_cast<std::size_t>(size);
        EXPECT_EQ(std::memcmp(by_vectors.data() + at, expected, bytes), 0);
        EXPECT_EQ(std::memcmp(by_elements.data() + at, expected, bytes), 0);
      }
    }
  }
}

TEST_OF_ELEMENTS(EmbeddingOnDevice, SumsEachRowsGradientsAndRoundsOnce) {
  for (const std::int64_t count : {0, 1, 5, 31, 32, 33, 64, 65, 700}) {
    for (const std::int64_t rows : {1, 3, 50, 5000}) {
      const std::vector<std::int64_t> indices = some_indices(count, rows);
      const std::vector<T> grad = normals<T>(count * 8, 1, 2);
      expect_backward(backward<T, kVector<T>>(indices, grad, 0, rows, 8), indices, grad, 0, 8);
    }
  }
}

TEST_OF_ELEMENTS(EmbeddingOnDevice, TakesRowsThatAreNotAligned) {
  const std::vector<std::int64_t> indices = some_indices(150, 9);
  for (const std::int64_t size : {1, 3, 7}) {
    const std::vector<T> grad = normals<T>(150 * size, 1, 2);
    expect_backward(backward<T, 1>(indices, grad, 0, 9, size), indices, grad, 0, size);
  }
}

TEST_OF_ELEMENTS(EmbeddingOnDevice, EachRankSumsItsRows) {
  const std::vector<std::int64_t> indices = some_indices(300, 20);
  std::vector<T> grad = normals<T>(300 * 8, 1, 2);
  const std::vector<T> whole = backward<T, kVector<T>>(indices, grad, 0, 20, 8);
  std::vector<T> parts;
  for (const auto& [first_row, rows] :
       {std::pair<std::int64_t, std::int64_t>{0, 1}, {1, 0}, {1, 12}, {13, 7}}) {
    const std::vector<T> part = backward<T, kVector<T>>(indices, grad, first_row, rows, 8);
    expect_backward(part, indices, grad, first_row, 8);
    parts.insert(parts.end(), part.begin(), part.end());
  }
  // The same bits.
  EXPECT_TRUE(std::ranges::equal(whole, parts, [](T a, T b) { return a == b; }));
}

TEST_OF_ELEMENTS(EmbeddingOnDevice, KeepsNaNInItsRow) {
  std::vector<std::int64_t> indices(100, 0);
  indices[40] = indices[70] = 1;
  std::vector<T> grad(100 * 8, T(1.0F));
  grad[40 * 8] = std::numeric_limits<T>::quiet_NaN();
  const std::vector<T> found = backward<T, kVector<T>>(indices, grad, 0, 2, 8);
  EXPECT_EQ(static_cast<float>(found[0]), 98.0F);
  EXPECT_TRUE(std::isnan(static_cast<float>(found[8])));
  EXPECT_EQ(static_cast<float>(found[9]), 2.0F);
}

TEST(CheckIndices, TakesThoseInRangeAndTheIgnoredOne) {
  const std::vector<std::int64_t> indices{0, 4, 5, -1, -100};
  const CheckIndices call{.indices = indices.data(), .count = 5, .size = 5, .ignored = -100};
  std::vector<bool> right;
  for (std::int64_t i = 0; i < call.count; ++i) {
    right.push_back(call.is_right(i));
  }
  EXPECT_EQ(right, (std::vector<bool>{true, true, false, false, true}));
}

}  // namespace
}  // namespace tessera::kernels
