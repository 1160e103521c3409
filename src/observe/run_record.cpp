#include "tessera/observe/run_record.h"

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "tessera/core/detail/layout.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/module.h"

namespace tessera::observe {
namespace {

/// Placements as text: "dp: Shard(0), tp: Replicate()". In a mesh without names, dimensions are
/// numbered.
std::string text_of(const Placements& placements, const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  for (std::size_t dim = 0; dim < placements.size(); ++dim) {
    parts.push_back(fmt::format("{}: {}", names.empty() ? std::to_string(dim) : names[dim],
                                to_string(placements[dim])));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

/// The placements of a distributed tensor, or the layout of the tensor if no list of placements
/// describes the layout.
std::string placements_text(const at::Tensor& tensor) {
  const auto& spec = sharding_spec(tensor);
  try {
    return text_of(DistributedTensor(tensor).placements(), spec.mesh.shape().names());
  } catch (const Error&) {
    return to_string(*spec.layout);
  }
}

/// The ShardingRow of one parameter. A plain parameter has the placements "-" and is wholly local.
ShardingRow row_of(const std::string& name, const at::Tensor& tensor) {
  const auto& local = local_tensor(tensor);
  return {name, tensor.sizes().vec(),
          tessera::is_distributed(tensor) ? placements_text(tensor) : "-", local.sizes().vec(),
          static_cast<std::int64_t>(local.nbytes())};
}

}  // namespace

std::vector<ShardingRow> sharding_table(const nn::ModuleBase& module) {
  std::vector<ShardingRow> table;
  for (const auto& [name, slot] : module.named_slots()) {
    // The entry describes the persistent tensor, which is FSDP's shard, because the unsharded
    // tensor is temporary.
    table.push_back(row_of(name, slot->persistent()));
  }
  return table;
}

void write_run_record(const RunRecord& record, const std::filesystem::path& path) {
  nlohmann::ordered_json json = {{"title", record.title},
                                 {"configuration", nlohmann::ordered_json::object()},
                                 {"sharding", nlohmann::ordered_json::array()}};
  for (const auto& [name, value] : record.configuration) {
    json["configuration"][name] = value;
  }
  for (const ShardingRow& row : record.sharding) {
    json["sharding"].push_back({{"name", row.name},
                                {"sizes", row.sizes},
                                {"placements", row.placements},
                                {"local_sizes", row.local_sizes},
                                {"local_bytes", row.local_bytes}});
  }
  // Invalid UTF-8, which a command-line value may contain, is replaced.
  files::write_file(
      path, json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace tessera::observe
