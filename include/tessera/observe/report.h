#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tessera/observe/metrics.h"

namespace tessera::observe {

/// One row of the sharding table.
struct ShardingRow {
  std::string name;
  std::vector<std::int64_t> sizes;
  std::string placements;
  std::vector<std::int64_t> local_sizes;
};

struct Report {
  std::string title;
  std::vector<std::pair<std::string, std::string>> configuration;
  std::vector<ShardingRow> sharding;
  std::vector<StepMetrics> steps;
  std::string sample;  ///< generated text, may be empty
};

/// Writes one self-contained HTML file (inline SVG and CSS, no script from elsewhere): curves of
/// loss, gradient norm, tokens/s and memory; configuration; sharding table; communication.
void write_report(const Report& report, const std::filesystem::path& path);

}  // namespace tessera::observe
