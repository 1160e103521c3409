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

/// Returns how each parameter of a module is distributed, as seen from this rank, in the order of
/// registration of the parameters: [{name, sizes, placements, local_sizes, local_bytes}]. The
/// placements are written "dp: Shard(0), tp: Replicate()", or "-" for a plain tensor. A layout that
/// no list of placements describes is written like "[3:m0 x 2]": 3 blocks of 2 rows, and the blocks
/// are split over mesh dimension 0. For an FSDP parameter, describes the shard. Not collective.
nlohmann::ordered_json sharding_table(const nn::ModuleBase& module);

/// Writes the description of a run as JSON: title, configuration {name: value}, and the
/// sharding_table() of the model as "sharding". The metrics are not included; tools/tessera_plot.py
/// plots both together. Replaces an older file. Throws Error if the file can't be written.
void write_run_record(const std::string& title,
                      const std::vector<std::pair<std::string, std::string>>& configuration,
                      const nn::ModuleBase& model, const std::filesystem::path& path);

}  // namespace tessera::observe
TESSERA_API_END
