// Shapes with published figures, to compare ours with.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bench {

/// What others have published for a model.
struct Shape {
  std::string_view name;       ///< the value of --shape
  std::string_view config;     ///< config.json
  std::int64_t seq = 0;        ///< tokens a sequence
  std::int64_t batch = 0;      ///< sequences a step and GPU
  std::string_view published;  ///< by whom, on what, and how fast
};

const std::vector<Shape>& shapes();
std::vector<std::string> shape_names();

/// The shape of that name, which must be one.
const Shape& shape_of(std::string_view name);

}  // namespace bench
