// A save has four phases, which all ranks end together: check and plan; create the folder; write;
// commit.

#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "format.h"
#include "manifest.h"
#include "objects.h"
#include "parameters.h"
#include "ranks.h"
#include "save.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/detail/copy_check.h"

namespace tessera::checkpoint {
namespace {

void check_arguments(std::int64_t step, const StateDict& state, const SaveOptions& options) {
  TESSERA_CHECK(step >= 0, "a checkpoint of step ", step, " is invalid: count steps from 0");
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

/// Throws Error unless all ranks plan the same save. Ranks with different models would write parts
/// that contradict the manifest; a rank with another step would overwrite the files of an older
/// step.
void check_same_plan(comm::Communicator& hosts, std::int64_t own) {
  const auto others = comm::ranks_that_differ(hosts, c10::kCPU, own);
  TESSERA_CHECK(
      others.empty(), "ranks ", fmt::format("{}", fmt::join(others, ", ")),
      " have another model, optimizer or objects than rank 0, in names, sizes, types or meshes, "
      "or save another step, to another folder, or with another run_id or keep: save the same on "
      "all "
      "ranks");
}

/// The tensors whose copies must be equal on all ranks: parameters and optimizer state. Buffers may
/// differ, for example the running statistics of a norm.
std::vector<nn::detail::CopiedTensor> copied_tensors(const nn::ModuleBase& model,
                                                     const std::vector<StateEntry>& entries) {
  std::set<std::string> buffers;
  for (const NamedParameter& each : saved_slots(model)) {
    if (each.is_buffer) {
      buffers.insert(each.names.front());
    }
  }
  // The tensor of a fused parameter has several entries, one for each part, and must be compared
  // only once.
  std::set<tessera::detail::TensorIdentity> known;
  std::vector<nn::detail::CopiedTensor> tensors;
  for (const StateEntry& entry : entries) {
    if (buffers.contains(entry.names.front()) ||
        !known.insert(tessera::detail::identity_of(entry.tensor)).second) {
      continue;
    }
    const bool is_counter = !entry.is_parameter && !tessera::is_distributed(entry.tensor) &&
                            tessera::is_distributed(entry.slot->persistent());
    tensors.push_back(
        {.name = fmt::format("{}'{}'", entry.is_parameter ? "parameter " : "", entry.names.front()),
         .slot = entry.slot.get(),
         .values = local_tensor(entry.tensor).detach(),
         .same_for_all_parts = is_counter,
         .rounded = tessera::is_distributed(entry.tensor)});
  }
  return tensors;
}

/// Throws Error if copies of a tensor differ between ranks. A file has one value for each element,
/// so a save of different copies would be a mixture.
void check_copies(comm::Communicator& hosts, const std::vector<nn::detail::CopiedTensor>& tensors) {
  nn::detail::check_copies({&hosts, comm::ranks_of_world(hosts.size()), c10::kCPU}, tensors,
                           {.what = "checkpoint::save"});
}

/// Records in the manifest the mesh of the first distributed tensor, for information only.
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
  std::string own_states;
  std::vector<nn::detail::CopiedTensor> copied;
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
    copied = copied_tensors(state.model, entries);
  });
  check_same_plan(hosts, own);
  check_copies(hosts, copied);
  if (!state.rank_states.empty()) {
    prepared.manifest.rank_states =
        rank_state_lists(comm::gather_texts(hosts, c10::kCPU, own_states));
  }
  return prepared;
}

namespace {

/// The metadata that PyTorch's HuggingFaceStorageReader needs: the offset of each block in its
/// tensor.
std::string sharding_info(const ShardFile& file) {
  nlohmann::json info;
  for (const FileChunk& chunk : file.chunks) {
    info[chunk.tensor]["saved_offsets"] = chunk.offset;
  }
  return info.dump();
}

void write_chunk(SafetensorsWriter& writer, const FileChunk& chunk) {
  for (const RowBlock& block : chunk.blocks) {
    const at::IntArrayRef all = block.values.sizes();
    for_each_piece(all, kMostPieceBytes / block.values.element_size(), [&](auto from, auto sizes) {
      std::vector<std::int64_t> offset(from.begin(), from.end());
      if (!offset.empty()) {
        offset[0] += block.row;
      }
      writer.write(chunk.tensor, offset, block_at(block.values, from, sizes));
    });
  }
}

FileRecord write_shard(const std::filesystem::path& folder, const ShardFile& file) {
  std::vector<SafetensorsWriter::Item> items;
  std::map<std::string, const FileChunk*> by_name;
  for (const FileChunk& chunk : file.chunks) {
    items.push_back({chunk.tensor, chunk.dtype, chunk.sizes});
    by_name.emplace(chunk.tensor, &chunk);
  }
  GranuleSums sums;
  SafetensorsWriter writer(
      folder / file.name, items, {{"format", "pt"}, {"DCP_SHARDING_INFO", sharding_info(file)}},
      [&sums](std::uint64_t offset, std::span<const std::byte> bytes) { sums.add(offset, bytes); });
  for (const std::string& tensor : writer.names()) {
    write_chunk(writer, *by_name.at(tensor));
  }
  writer.finish();
  return {file.name, sums.bytes(), sums.sums()};
}

}  // namespace

std::vector<FileRecord> write_shards(const std::filesystem::path& folder,
                                     const std::vector<ShardFile>& files) {
  std::vector<FileRecord> records;
  for (const ShardFile& file : files) {
    records.push_back(write_shard(folder, file));
  }
  return records;
}

namespace {

/// Serializes file records for rank 0, one line for each file: name, size and checksums.
std::string to_lines(const std::vector<FileRecord>& records) {
  std::ostringstream lines;
  for (const FileRecord& record : records) {
    lines << record.name << ' ' << record.bytes << ' ' << record.sums.size();
    for (const std::uint32_t sum : record.sums) {
      lines << ' ' << sum;
    }
    lines << '\n';
  }
  return lines.str();
}

/// Fills the file records of the manifest from the lines of all ranks.
void complete_files(Manifest& manifest, const std::vector<std::string>& lines) {
  std::map<std::string, FileRecord*> by_name;
  for (FileRecord& file : manifest.files) {
    by_name.emplace(file.name, &file);
  }
  for (const std::string& of_rank : lines) {
    std::istringstream in(of_rank);
    std::string name;
    while (in >> name) {
      FileRecord& file = *by_name.at(name);
      std::size_t count = 0;
      in >> file.bytes >> count;
      file.sums.resize(count);
      for (std::uint32_t& sum : file.sums) {
        in >> sum;
      }
    }
  }
}

/// Writes all files and commits the step. Rank 0 receives the file records of all ranks as text.
/// `committed` is set to true on rank 0 as soon as the step exists.
void write_and_commit(comm::Communicator& hosts, PreparedSave& save, bool& committed) {
  std::vector<FileRecord> records;
  run_or_fail_on_all(hosts, [&] { records = write_shards(save.folder.path(), save.files); });
  const auto lines = comm::gather_texts(hosts, c10::kCPU, to_lines(records));
  run_or_fail_on_all(hosts, [&] {
    if (hosts.rank() == 0) {
      complete_files(save.manifest, lines);
      const std::string text = to_text(save.manifest);
      parse_manifest(text,
                     // A manifest that load() would reject is never committed.
                     save.folder.path() / kManifestFile);
      save.folder.commit(text);
      committed = true;
    }
  });
}

/// Removes markers and old steps after the commit. The step already exists, so a failure of
/// tidy_up() only wastes disk space.
void tidy_up(const StepFolder& folder, int keep) noexcept {
  try {
    folder.release();
    folder.clean_up_others(keep);
  } catch (const std::exception& error) {
    TORCH_WARN("the checkpoint was saved, but others could not be removed: ", error.what());
  }
}

}  // namespace

void save_step(comm::Communicator& hosts, PreparedSave save) {
  const at::NoGradGuard no_grad;
  run_or_fail_on_all(hosts, [&] {
    if (hosts.rank() == 0) {
      save.folder.claim();
    }
  });
  bool committed = false;
  try {
    write_and_commit(hosts, save, committed);
  } catch (const comm::PeerError&) {
    // The folder is not removed, because other ranks may still write or may have committed. The
    // next save removes leftovers.
    throw;
  } catch (...) {
    if (hosts.rank() == 0 && !committed) {
      save.folder.discard();
    }
    throw;
  }
  if (hosts.rank() == 0) {
    tidy_up(save.folder, save.keep);
  }
}

void save(comm::World& world, const std::filesystem::path& dir, std::int64_t step,
          const StateDict& state, const SaveOptions& options) {
  const comm::CallerScope caller("checkpoint::save");
  const at::NoGradGuard no_grad;
  const comm::CommunicatorPtr hosts = hosts_of_saves(world);
  finish_pending_save(*hosts);
  save_step(*hosts, prepare_save(*hosts, dir, step, state, options));
}

}  // namespace tessera::checkpoint
