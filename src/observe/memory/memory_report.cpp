#include "tessera/observe/memory_report.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/comm/detail/rank_threads.h"
#include "tessera/core/atomic_file.h"
#include "texts_on_first.h"

namespace tessera::observe {
namespace {

using nlohmann::ordered_json;

/// Kinds with any memory.
ordered_json json_of_kinds(const BytesByKind& most, const BytesByKind& at_peak) {
  ordered_json json = ordered_json::object();
  for (std::size_t i = 0; i < kMemoryKinds; ++i) {
    if (most[i] > 0) {
      json[to_string(static_cast<MemoryKind>(i))] = {{"at_peak", at_peak[i]}, {"most", most[i]}};
    }
  }
  return json;
}

ordered_json json_of_rank(int rank, const RankMemory& memory) {
  ordered_json json = {
      {"rank", rank},
      {"place", memory.place},
      {"step", memory.step},
      {"peak_reserved_bytes", memory.peak_reserved_bytes},
      {"peak_active_bytes",
       memory.peak_active_bytes ? ordered_json(*memory.peak_active_bytes) : ordered_json()},
      {"peak_bytes", nullptr},
      {"peak_moment", nullptr},
      {"kinds", nullptr},
      {"units", nullptr}};
  if (!memory.tensors) {
    return json;
  }
  const StepMemory& tensors = *memory.tensors;
  json["peak_bytes"] = tensors.peak_bytes;
  json["peak_moment"] = tensors.peak_moment;
  json["kinds"] = json_of_kinds(tensors.most, tensors.at_peak);
  json["units"] = ordered_json::object();
  for (const auto& [name, unit] : tensors.units) {
    json["units"][name] = json_of_kinds(unit.most, unit.at_peak);
  }
  return json;
}

}  // namespace

void write_memory_report(const std::filesystem::path& path, comm::World& world,
                         const RankMemory& memory) {
  std::vector<std::string> texts{json_of_rank(world.rank(), memory).dump()};
  if (world.size() > 1) {
    texts = texts_on_first(*world.host_group(comm::ranks_of_world(world.size()), "memory report"),
                           texts.front());
  }
  if (world.rank() != 0) {
    return;
  }
  ordered_json ranks = ordered_json::array();
  for (const std::string& text : texts) {
    ranks.push_back(ordered_json::parse(text));
  }
  files::write_file(path, ordered_json{{"ranks", ranks}}.dump(2) + "\n");
}

}  // namespace tessera::observe
