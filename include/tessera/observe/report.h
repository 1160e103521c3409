#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/observe/metrics.h"
#include "tessera/observe/sharding_table.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// What write_report() shows.
struct Report {
  std::string title{};
  std::vector<std::pair<std::string, std::string>> configuration{};  ///< name, value
  std::vector<ShardingRow> sharding{};
  std::vector<StepMetrics> steps{};
  std::string sample{};  ///< generated text, may be empty and need not be valid UTF-8
};

/// Writes one self-contained HTML file (inline SVG and CSS, no script, nothing fetched): curves of
/// loss, gradient norm, tokens/s and memory; communication of the last step; configuration;
/// sharding table; sample. An older file is replaced at the end. Throws Error if the file can't be
/// written.
void write_report(const Report& report, const std::filesystem::path& path);

}  // namespace tessera::observe
TESSERA_API_END
