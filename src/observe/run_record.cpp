#include "tessera/observe/run_record.h"

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/core/detail/files.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/module.h"

namespace tessera::observe {
namespace {

/// Returns placements as text: "dp: Shard(0), tp: Replicate()". In a mesh without names, dimensions
/// are numbered.
std::string text_of(const Placements& placements, const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  for (std::size_t dim = 0; dim < placements.size(); ++dim) {
    parts.push_back(fmt::format("{}: {}", names.empty() ? std::to_string(dim) : names[dim],
                                to_string(placements[dim])));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

/// Returns the placements of a distributed tensor, or the tensor's layout if no list of placements
/// describes the layout.
std::string placements_text(const at::Tensor& tensor) {
  const auto& spec = sharding_spec(tensor);
  try {
    return text_of(DistributedTensor(tensor).placements(), spec.mesh.shape().names());
  } catch (const Error&) {
    return to_string(*spec.layout);
  }
}

}  // namespace

nlohmann::ordered_json sharding_table(const nn::ModuleBase& module) {
  nlohmann::ordered_json table = nlohmann::ordered_json::array();
  for (const auto& [name, slot] : module.named_slots()) {
    // The run record describes the parameter's persistent tensor: FSDP's shard. The unsharded
    // tensor exists only temporarily.
    const at::Tensor& tensor = slot->persistent();
    const at::Tensor& local = local_tensor(tensor);
    table.push_back(
        {{"name", name},
         {"sizes", tensor.sizes().vec()},
         {"placements", tessera::is_distributed(tensor) ? placements_text(tensor) : "-"},
         {"local_sizes", local.sizes().vec()},
         {"local_bytes", local.nbytes()}});
  }
  return table;
}

void write_run_record(const std::string& title,
                      const std::vector<std::pair<std::string, std::string>>& configuration,
                      const nn::ModuleBase& model, const std::filesystem::path& path) {
  nlohmann::ordered_json json = {{"title", title},
                                 {"configuration", nlohmann::ordered_json::object()},
                                 {"sharding", sharding_table(model)}};
  for (const auto& [name, value] : configuration) {
    json["configuration"][name] = value;
  }
  // Invalid UTF-8 in the run record, for example in a command-line value, is replaced.
  files::write_file(
      path, json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace tessera::observe
