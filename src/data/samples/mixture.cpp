#include "mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tessera::data {
namespace {

/// Products of two shares fit into 62 bits.
constexpr double kUnits = std::int64_t{1} << 30;

/// round(n * part / all), exactly, and without an overflow for any n.
std::int64_t dealt(std::int64_t n, std::int64_t part, std::int64_t all) {
  return n / all * part + (n % all * part + all / 2) / all;
}

}  // namespace

/// Whole numbers, so that every machine rounds alike.
Mixture::Mixture(const std::vector<double>& weights) : sums_{0} {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (const double weight : weights) {
    const auto share = static_cast<std::int64_t>(std::llround(weight / total * kUnits));
    sums_.push_back(sums_.back() + std::max<std::int64_t>(share, 1));
  }
}

Mixture::Node Mixture::node(std::size_t first, std::size_t last) const {
  const std::size_t middle = (first + last) / 2;
  return {first, middle, last, sums_[middle] - sums_[first], sums_[last] - sums_[first]};
}

Mixture::Place Mixture::operator()(std::int64_t n) const {
  std::size_t first = 0;
  std::size_t last = sums_.size() - 1;
  while (last - first > 1) {
    const Node at = node(first, last);
    const std::int64_t before = dealt(n, at.part, at.all);
    if (dealt(n + 1, at.part, at.all) > before) {
      last = at.middle;
      n = before;
    } else {
      first = at.middle;
      n -= before;
    }
  }
  return {first, n};
}

/// Among m consecutive samples a source with share p gets at most ceil(m p).
std::int64_t Mixture::most(std::size_t source, std::int64_t samples) const {
  std::size_t first = 0;
  std::size_t last = sums_.size() - 1;
  while (last - first > 1) {
    const Node at = node(first, last);
    const bool in_first = source < at.middle;
    const std::int64_t part = in_first ? at.part : at.all - at.part;
    samples = samples / at.all * part + (samples % at.all * part + at.all - 1) / at.all;
    (in_first ? last : first) = at.middle;
  }
  return samples;
}

}  // namespace tessera::data
