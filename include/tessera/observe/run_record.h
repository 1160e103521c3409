#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {
class ModuleBase;
}

namespace tessera::observe {

/// How one parameter is distributed, as seen from this rank.
struct ShardingRow {
  std::string name;
  std::vector<std::int64_t> sizes;  ///< global sizes of the parameter
  /// The placements: "dp: Shard(0), tp: Replicate()"; "-" for a plain tensor. A layout that no list
  /// of placements describes is written as "[3:m0 x 2]".
  std::string placements;
  std::vector<std::int64_t> local_sizes;  ///< sizes of this rank's part
  std::int64_t local_bytes = 0;
};

/// Returns one entry for each parameter of a module, in order of registration. For a parameter that
/// FSDP manages, the entry describes the FSDP shard. Not collective.
std::vector<ShardingRow> sharding_table(const nn::ModuleBase& module);

/// The description of a run: everything except its metrics.
struct RunRecord {
  std::string title{};
  std::vector<std::pair<std::string, std::string>> configuration{};  ///< pairs of name and value
  std::vector<ShardingRow> sharding{};
};

/// Writes the record as JSON: title, configuration {name: value}, sharding [{name, sizes,
/// placements, local_sizes, local_bytes}]. tools/tessera_plot.py plots the record together with the
/// metrics. Replaces an older file. Throws Error if the file can't be written.
void write_run_record(const RunRecord& record, const std::filesystem::path& path);

}  // namespace tessera::observe
TESSERA_API_END
