#pragma once

#include <array>
#include <cstdint>

namespace tessera::data {

/// A permutation of the numbers [0, count), drawn by a seed and a number (of the epoch), that is
/// computed for each number by itself: nothing is stored, and every place is as near as the next.
/// A Feistel network (Luby & Rackoff 1988) over the next power of four, repeated until it hits the
/// range: at most four times on average.
class Permutation {
 public:
  Permutation(std::int64_t count, std::uint64_t seed, std::uint64_t number);
  /// `index` is in [0, count).
  std::int64_t operator()(std::int64_t index) const;

 private:
  std::uint64_t encipher(std::uint64_t value) const;

  std::uint64_t count_;
  int half_bits_ = 1;
  std::array<std::uint64_t, 4> keys_;
};

}  // namespace tessera::data
