#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {
class ModuleBase;
}

namespace tessera::observe {

/// Returns this rank's layout of each parameter: [{name, sizes, placements, local_sizes,
/// local_bytes}]. Placements are text: "dp: Shard(0), tp: Replicate()"; "-" for a plain tensor;
/// "[3:m0 x 2]" for 3 blocks of 2 rows, split over mesh dimension 0. FSDP parameters are shards.
/// Not collective.
nlohmann::ordered_json sharding_table(const nn::ModuleBase& module);

/// Writes the title, the configuration {name: value} and the sharding_table() of a run as JSON, for
/// tools/tessera_plot.py. Replaces an older file. Throws Error if the file can't be written.
void write_run_record(const std::string& title,
                      const std::vector<std::pair<std::string, std::string>>& configuration,
                      const nn::ModuleBase& model, const std::filesystem::path& path);

}  // namespace tessera::observe
TESSERA_API_END
