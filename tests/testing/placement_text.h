#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "tessera/core/placement.h"

namespace tessera::testing {

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) {
    parts.push_back(part);
  }
  return parts;
}

/// "R", "S0", "P", "Pmax", ...: a placement as the tables of tests write it.
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

/// "S0,R": one for each mesh dimension.
inline Placements placements_of(const std::string& text) {
  Placements placements;
  for (const auto& part : split(text, ',')) {
    placements.push_back(placement_of(part));
  }
  return placements;
}

}  // namespace tessera::testing
