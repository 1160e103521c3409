#include "save/prepare_save.h"

#include <c10/core/Device.h>
#include <fmt/ranges.h>

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "all_ranks.h"
#include "parameters/parameters.h"
#include "parameters/state_entries.h"
#include "safetensors/format.h"
#include "save/save_plan.h"
#include "step/dropout_calls.h"
#include "step/objects.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/detail/crc32c.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

void check_arguments(std::int64_t step, const StateDict& state, const SaveOptions& options) {
  TESSERA_CHECK(step >= 0, "a checkpoint of step ", step, " was asked for: count steps from 0");
  TESSERA_CHECK(options.keep == 0 || options.keep >= 2, "keep is ", options.keep,
                ": keep 2 steps or more, so that one is there if the newest is damaged, or 0, all");
  TESSERA_CHECK(state.entries.is_object(), "the entries of a checkpoint are a JSON ",
                state.entries.type_name(), ": pass an object");
  check_storable(state.entries, "the entries of a checkpoint");
  TESSERA_CHECK(is_run_id(options.run_id), "the run_id has ", options.run_id.size(),
                " bytes: use printable ASCII characters, at most 200");
}

void check_entries(const std::vector<StateEntry>& entries) {
  for (const StateEntry& entry : entries) {
    check_one_value(*entry.slot, entry.names.front());
    TESSERA_CHECK(find_dtype(entry.tensor.scalar_type()) != nullptr, "tensor '",
                  entry.names.front(), "' has the type ", c10::toString(entry.tensor.scalar_type()),
                  ", which safetensors lacks: convert it first");
  }
}

/// Ranks with different models would write parts that differ from the manifest; one with another
/// step would overwrite the files of an older step.
void check_same_plan(comm::Communicator& hosts, std::int64_t own) {
  const auto others = comm::ranks_that_differ(hosts, c10::kCPU, own);
  TESSERA_CHECK(
      others.empty(), "ranks ", fmt::format("{}", fmt::join(others, ", ")),
      " have another model, optimizer or objects than rank 0, in names, sizes, types or meshes, "
      "or save another step, to another folder, or with another run_id or keep: save the same on "
      "all "
      "ranks");
}

/// One line for each parameter that is on no mesh: its name, and a checksum of its values. Copies
/// of parameters on a mesh are equal by how they are trained; nothing keeps these equal.
std::string plain_values(const nn::ModuleBase& model) {
  std::string lines;
  for (const NamedParameter& each : parameter_names(model)) {
    const at::Tensor& tensor = each.slot->persistent();
    if (tessera::is_distributed(tensor)) {
      continue;
    }
    const at::Tensor host = tensor.detach().cpu().contiguous();
    const std::span bytes(static_cast<const std::byte*>(host.const_data_ptr()), host.nbytes());
    lines += fmt::format("{} {:08x}\n", each.names.front(), detail::crc32c(bytes));
  }
  return lines;
}

/// A file holds one value of a parameter: rank 0's would be saved, and the others lost.
void check_same_values(comm::Communicator& hosts, const std::string& own) {
  const std::vector<std::string> all = comm::texts_that_differ(hosts, own);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    std::istringstream first(all[0]), other(all[rank]);
    std::string name, sum, other_name, other_sum;
    while (first >> name >> sum && other >> other_name >> other_sum) {
      TESSERA_CHECK(name == other_name && sum == other_sum, "parameter '", name,
                    "' is on no mesh and has other values on rank ", rank,
                    " than on rank 0, but a checkpoint holds one tensor under that name: put it in "
                    "a unit of fsdp::fully_shard or fsdp::replicate, which keep its copies equal, "
                    "or make them equal before saving");
    }
  }
}

/// Notes the mesh of the first tensor that is on one, for information.
void set_mesh(Manifest& manifest, const std::vector<StateEntry>& entries) {
  for (const StateEntry& entry : entries) {
    if (tessera::is_distributed(entry.tensor)) {
      const MeshShape shape = sharding_spec(entry.tensor).mesh.root().shape();
      manifest.mesh_sizes = shape.sizes();
      manifest.mesh_names = shape.names();
      return;
    }
  }
}

void set_tensors(Manifest& manifest, const std::vector<StateEntry>& entries, const SavePlan& plan) {
  std::set<std::string> names;
  for (const PlannedChunk& chunk : plan.chunks) {
    names.insert(plan.file_name(chunk));
  }
  std::map<std::string, std::size_t> index_of;
  for (const std::string& name : names) {
    index_of.emplace(name, manifest.files.size());
    manifest.files.push_back({name, 0, {}});
  }
  for (const StateEntry& entry : entries) {
    ManifestTensor tensor;
    tensor.dtype = find_dtype(entry.tensor.scalar_type())->name;
    tensor.sizes = entry.stored.sizes;
    tensor.tied.assign(entry.names.begin() + 1, entry.names.end());
    manifest.tensors.emplace(entry.names.front(), std::move(tensor));
  }
  for (const PlannedChunk& chunk : plan.chunks) {
    manifest.tensors.at(entries[chunk.entry].names.front())
        .chunks.push_back({index_of.at(plan.file_name(chunk)), chunk.offset, chunk.sizes});
  }
}

}  // namespace

PreparedSave prepare_save(comm::Communicator& hosts, const std::filesystem::path& dir,
                          std::int64_t step, const StateDict& state, const SaveOptions& options) {
  PreparedSave prepared{StepFolder(dir, step, options.run_id), options.keep, {}, {}};
  std::int64_t own = 0;
  std::string own_states, own_values;
  run_or_fail_on_all(hosts, [&] {
    check_arguments(step, state, options);
    check_filled(saved_slots(state.model));
    const std::vector<StateEntry> entries = state_entries(state);
    check_entries(entries);
    const SavePlan plan = plan_save(entries, hosts.size());
    own =
        fingerprint(prepared.folder.path(), entries, plan,
                    fmt::format("{} {} {}", names_of_objects(state), options.keep, options.run_id));
    prepared.files = shard_files(plan, entries, hosts.rank());
    prepared.manifest = {.run_id = options.run_id, .step = step, .world_size = hosts.size()};
    prepared.manifest.entries = state.entries;
    prepared.manifest.dropout_calls = dropout_calls(state.model);
    set_mesh(prepared.manifest, entries);
    set_tensors(prepared.manifest, entries, plan);
    add_stateful(prepared.manifest, state);
    own_states = own_rank_states(state.rank_states).dump();
    own_values = hosts.size() > 1 ? plain_values(state.model) : "";
  });
  check_same_plan(hosts, own);
  check_same_values(hosts, own_values);
  if (!state.rank_states.empty()) {
    prepared.manifest.rank_states =
        rank_state_lists(comm::gather_texts(hosts, c10::kCPU, own_states));
  }
  return prepared;
}

}  // namespace tessera::checkpoint
