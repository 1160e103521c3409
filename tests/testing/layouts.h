// Placements written as text, and random layouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/detail/layout.h"

namespace tessera::testing {

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) {
    parts.push_back(part);
  }
  return parts;
}

/// Parses a placement such as "R", "S0", "P" or "Pmax".
inline Placement placement_of(const std::string& text) {
  if (text == "R") {
    return Replicate{};
  }
  if (text == "P") {
    return Partial{};
  }
  if (text == "Pavg") {
    return Partial{ReduceOp::kAvg};
  }
  if (text == "Pmax") {
    return Partial{ReduceOp::kMax};
  }
  if (text == "Pmin") {
    return Partial{ReduceOp::kMin};
  }
  return Shard{text[1] - '0'};
}

/// Parses placements such as "S0,R": one for each mesh dimension.
inline Placements placements_of(const std::string& text) {
  Placements placements;
  for (const auto& part : split(text, ',')) {
    placements.push_back(placement_of(part));
  }
  return placements;
}

inline std::vector<std::int64_t> random_sizes(std::mt19937& engine, std::size_t length,
                                              const std::vector<std::int64_t>& choices) {
  std::vector<std::int64_t> sizes(length);
  for (auto& size : sizes) {
    size = choices[engine() % choices.size()];
  }
  return sizes;
}

/// Draws a layout. Each mesh dimension is replicated, has a Partial reduction from `ops`, or shards
/// a tensor dimension. Ranks draw equal layouts if their engines have equal states.
inline LayoutPtr random_layout(std::mt19937& engine, const std::vector<std::int64_t>& mesh,
                               const std::vector<std::int64_t>& sizes,
                               const std::vector<ReduceOp>& ops) {
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(engine() % n); };
  Layout::Dims dims;
  for (const std::int64_t size : sizes) {
    const std::int64_t outer = below(2) == 0 ? 2 : 3;
    const bool several = size % outer == 0 && size > outer && below(2) == 0;
    dims.push_back(several ? std::vector<Digit>{{outer, {}}, {size / outer, {}}}
                           : std::vector<Digit>{{0, {}}});
  }
  std::vector<int> order;
  for (int m = 0; m < static_cast<int>(mesh.size()); ++m) {
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(below(order.size() + 1)), m);
  }
  std::vector<PartialDim> partial;
  for (const int m : order) {
    const std::size_t dim = below(sizes.size() + (ops.empty() ? 1 : 2));
    if (dim < sizes.size()) {
      dims[dim][below(dims[dim].size())].mesh_dims.push_back(m);
    } else if (dim > sizes.size()) {
      partial.push_back({m, ops[below(ops.size())]});
    }
  }
  return Layout::intern(mesh, std::move(dims), std::move(partial));
}

}  // namespace tessera::testing
