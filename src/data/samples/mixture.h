#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::data {

/// An order in which samples are taken from several sources by their weights, computed for each
/// number independently. Sources are halved repeatedly, and samples are dealt to two halves as
/// Bresenham draws a line: of the first n that reach a node, its first half gets round(n p). So in
/// any prefix each source has its weight's share, to within one half for each of the log2 halvings
/// of the sources.
class Mixture {
 public:
  /// `weights`: positive, of any sum.
  explicit Mixture(const std::vector<double>& weights);

  struct Place {
    std::size_t source;
    std::int64_t index;  ///< among the samples of that source
  };
  /// Where sample n >= 0 comes from.
  Place operator()(std::int64_t n) const;
  /// The most that a source gives to so many samples in a row.
  std::int64_t most(std::size_t source, std::int64_t samples) const;

 private:
  /// The shares of a node, of the sources [first, last), and of its first half.
  struct Node {
    std::size_t first, middle, last;
    std::int64_t part, all;
  };
  Node node(std::size_t first, std::size_t last) const;

  std::vector<std::int64_t> sums_;  ///< sums of the shares of the sources before, in units of 2^-30
};

}  // namespace tessera::data
