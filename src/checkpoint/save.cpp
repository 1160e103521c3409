// A checkpoint save has four phases: check and plan; create the folder; write; commit. No rank
// begins a phase before all ranks have ended the previous phase.

#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <set>

#include "format.h"
#include "parameters.h"
#include "ranks.h"
#include "save.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/detail/copy_check.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

// A SavePlan says which rank writes which blocks of which local tensors. Every rank computes the
// same SavePlan from the layouts, without communication.

/// Consecutive rows of a stored block (chunk), and where these rows are in the rank's local tensor.
struct ChunkRows {
  std::int64_t row = 0;  ///< index of the first row in the stored block; 0 for a scalar
  std::vector<std::int64_t> local_offset;
  std::vector<std::int64_t> sizes;
};

/// A block of a model or optimizer tensor that one rank writes.
struct PlannedChunk {
  std::size_t entry = 0;
  std::vector<int> holders = {};  ///< the ranks that have the block
  int rank = 0;                   ///< the rank that writes the block to a file
  int file = 0;                   ///< index of the block's file among the files of `rank`, from 1
  std::vector<std::int64_t> offset, sizes;
  std::vector<ChunkRows> parts;  ///< consecutive ranges of rows of the block
};

struct SavePlan {
  std::vector<PlannedChunk> chunks;  ///< the blocks of all ranks, in the order of the StateEntries
  int files = 1;                     ///< the largest number of files that a rank writes

  /// Returns the name of a block's file, such as "shard-00000-model-00001-of-00002.safetensors".
  std::string file_name(const PlannedChunk& chunk) const {
    return fmt::format("shard-{:05}-model-{:05}-of-{:05}.safetensors", chunk.rank, chunk.file,
                       files);
  }
};

using Coordinate = std::vector<std::int64_t>;

/// The ranks that have one shard of a tensor.
struct Holders {
  Coordinate coordinate;   ///< the mesh coordinate of the shard; empty for a plain tensor
  std::vector<int> ranks;  ///< world ranks that have the shard, in ascending order
};

/// The root mesh can have several slices of the same shape as `mesh`. Returns, for each coordinate
/// in `mesh`, the ranks that have this coordinate in any slice.
std::vector<std::vector<int>> ranks_by_position(const DeviceMesh& mesh) {
  const DeviceMesh root = mesh.root();
  const std::vector<int>& root_ranks = root.ranks();
  std::vector<Coordinate> coordinates;
  for (const int rank : mesh.ranks()) {
    const auto found = std::ranges::find(root_ranks, rank);
    coordinates.push_back(root.shape().coordinate(found - root_ranks.begin()));
  }
  const std::vector<bool> differs = nn::detail::dims_in_root(mesh);
  std::int64_t slice_size = 1;
  for (std::size_t dim = 0; dim < differs.size(); ++dim) {
    slice_size *= differs[dim] ? root.size(static_cast<int>(dim)) : 1;
  }
  TESSERA_CHECK(slice_size == mesh.size(), "a tensor is on the mesh ", to_string(mesh),
                ", which has only some ranks of a dimension of ", to_string(root),
                ", so save() can't find the ranks that have copies of the tensor: distribute the "
                "tensor over whole mesh dimensions before saving");
  const auto along = [&](const Coordinate& coordinate) {
    Coordinate kept(coordinate.size(), 0);
    for (std::size_t dim = 0; dim < kept.size(); ++dim) {
      kept[dim] = differs[dim] ? coordinate[dim] : 0;
    }
    return kept;
  };
  std::map<Coordinate, std::size_t> position_of;
  for (std::size_t position = 0; position < coordinates.size(); ++position) {
    position_of.emplace(along(coordinates[position]), position);
  }
  std::vector<std::vector<int>> ranks(coordinates.size());
  for (std::int64_t index = 0; index < root.size(); ++index) {
    const auto position = position_of.at(along(root.shape().coordinate(index)));
    ranks[position].push_back(root.ranks()[static_cast<std::size_t>(index)]);
  }
  return ranks;
}

/// Returns, for each shard of a tensor, the ranks that have the shard. Includes ranks of other
/// slices if the mesh is a slice of a root mesh.
std::vector<Holders> holders_of(const at::Tensor& tensor) {
  // Only rank 0 saves plain tensors: plain buffers, such as a norm's running statistics, can differ
  // between ranks.
  if (!tessera::is_distributed(tensor)) {
    return {{{}, {0}}};
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  const auto positions = ranks_by_position(spec.mesh);
  // Ranks with equal coordinates in the sharding mesh dimensions have the same shard. The other
  // coordinates become 0, so that these ranks have the same key in `holders`.
  std::map<Coordinate, Holders> holders;
  for (std::size_t position = 0; position < positions.size(); ++position) {
    Coordinate coordinate = spec.mesh.shape().coordinate(static_cast<std::int64_t>(position));
    for (int dim = 0; dim < spec.mesh.ndim(); ++dim) {
      if (spec.layout->sharded_dim(dim) < 0) {
        coordinate[static_cast<std::size_t>(dim)] = 0;
      }
    }
    Holders& same = holders[coordinate];
    same.coordinate = coordinate;
    same.ranks.insert(same.ranks.end(), positions[position].begin(), positions[position].end());
  }
  std::vector<Holders> list;
  for (auto& [coordinate, same] : holders) {
    std::ranges::sort(same.ranks);
    list.push_back(same);
  }
  return list;
}

constexpr int kWeightsFile = 1;
constexpr int kOptimizerFile = 2;

std::vector<Box> boxes_at(const at::Tensor& tensor, const Coordinate& coordinate) {
  if (tessera::is_distributed(tensor)) {
    return owned_boxes(*sharding_spec(tensor).layout, tensor.sizes().vec(), coordinate);
  }
  std::vector<Box> boxes;
  if (tensor.numel() != 0) {
    Box& whole = boxes.emplace_back();
    whole.sizes = tensor.sizes().vec();
    whole.global_offset.assign(whole.sizes.size(), 0);
    whole.local_offset = whole.global_offset;
  }
  return boxes;
}

bool continues(const PlannedChunk& chunk, const PlannedChunk& next) {
  return !chunk.sizes.empty() && next.offset[0] == chunk.offset[0] + chunk.sizes[0] &&
         std::equal(chunk.offset.begin() + 1, chunk.offset.end(), next.offset.begin() + 1) &&
         std::equal(chunk.sizes.begin() + 1, chunk.sizes.end(), next.sizes.begin() + 1);
}

/// Appends the block `next`, which has one range of rows, to a list. If the last block of the list
/// ends where `next` begins, merges the two blocks.
void append(std::vector<PlannedChunk>& chunks, PlannedChunk next) {
  if (chunks.empty() || !continues(chunks.back(), next)) {
    chunks.push_back(std::move(next));
    return;
  }
  PlannedChunk& chunk = chunks.back();
  next.parts[0].row = chunk.sizes[0];
  chunk.sizes[0] += next.sizes[0];
  chunk.parts.push_back(std::move(next.parts[0]));
}

std::vector<PlannedChunk> chunks_at(const StateEntry& entry, std::size_t index,
                                    const Coordinate& coordinate) {
  std::vector<PlannedChunk> chunks;
  for (const Box& box : boxes_at(entry.tensor, coordinate)) {
    PlannedChunk chunk{.entry = index,
                       .offset = box.global_offset,
                       .sizes = box.sizes,
                       .parts = {{0, box.local_offset, box.sizes}}};
    if (!entry.stored.rows) {
      append(chunks, std::move(chunk));
      continue;
    }
    entry.stored.rows->visit(box.global_offset[0], box.sizes[0],
                             [&](std::int64_t row, std::int64_t from, std::int64_t rows) {
                               PlannedChunk run = chunk;
                               run.offset[0] = row;
                               run.sizes[0] = run.parts[0].sizes[0] = rows;
                               run.parts[0].local_offset[0] += from;
                               if (entry.stored.is_matrix_of_stack) {
                                 run.offset.erase(run.offset.begin());
                                 run.sizes.erase(run.sizes.begin());
                               }
                               append(chunks, std::move(run));
                             });
  }
  return chunks;
}

std::int64_t bytes_of_chunk(const StateEntry& entry, const PlannedChunk& chunk) {
  return std::accumulate(chunk.sizes.begin(), chunk.sizes.end(), entry.tensor.element_size(),
                         std::multiplies<>());
}

/// Assigns blocks to files. A name can appear only once in a file, so a rank's second block of a
/// tensor is stored in another file.
void number_files(SavePlan& plan, const std::vector<StateEntry>& entries) {
  std::map<std::pair<std::size_t, int>, int> boxes;
  for (PlannedChunk& chunk : plan.chunks) {
    const int earlier = boxes[{chunk.entry, chunk.rank}]++;
    const int first = entries[chunk.entry].is_parameter ? kWeightsFile : kOptimizerFile;
    chunk.file = earlier == 0 ? first : kOptimizerFile + earlier;
    plan.files = std::max(plan.files, chunk.file);
  }
}

/// Chooses the rank that writes each block: the rank with the fewest bytes so far. Blocks on one
/// rank come first, then large before small blocks, for balance.
void choose_ranks(std::vector<PlannedChunk>& chunks, const std::vector<StateEntry>& entries,
                  int world_size) {
  const auto bytes_of = [&](const PlannedChunk* chunk) {
    return bytes_of_chunk(entries[chunk->entry], *chunk);
  };
  std::vector<PlannedChunk*> order;
  for (PlannedChunk& chunk : chunks) {
    order.push_back(&chunk);
  }
  std::ranges::stable_sort(order, {}, [&](const PlannedChunk* chunk) {
    return std::pair(chunk->holders.size() > 1, -bytes_of(chunk));
  });
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(world_size), 0);
  const auto bytes_of_rank = [&bytes](int rank) -> std::int64_t& {
    return bytes[static_cast<std::size_t>(rank)];
  };
  for (PlannedChunk* chunk : order) {
    chunk->rank = *std::ranges::min_element(chunk->holders, {}, bytes_of_rank);
    bytes_of_rank(chunk->rank) += bytes_of(chunk);
  }
}

SavePlan plan_save(const std::vector<StateEntry>& entries, int world_size) {
  SavePlan plan;
  for (std::size_t index = 0; index < entries.size(); ++index) {
    for (const Holders& holders : holders_of(entries[index].tensor)) {
      for (PlannedChunk& chunk : chunks_at(entries[index], index, holders.coordinate)) {
        chunk.holders = holders.ranks;
        plan.chunks.push_back(std::move(chunk));
      }
    }
  }
  choose_ranks(plan.chunks, entries, world_size);
  number_files(plan, entries);
  return plan;
}

/// Returns a hash of the folder's path, the layout of the saved tensors, and `others`, a text. The
/// hash must be equal on all ranks.
std::int64_t fingerprint(const std::filesystem::path& folder,
                         const std::vector<StateEntry>& entries, const SavePlan& plan,
                         const std::string& others) {
  std::uint32_t crc = 0;
  const auto add = [&crc](const std::string& text) {
    crc = tessera::detail::crc32c(std::as_bytes(std::span(text)), crc);
  };
  add(std::filesystem::absolute(folder).lexically_normal().string());
  add(others);
  for (const StateEntry& entry : entries) {
    add(fmt::format("{} {} [{}]", fmt::join(entry.names, "="),
                    c10::toString(entry.tensor.scalar_type()), fmt::join(entry.stored.sizes, ",")));
  }
  for (const PlannedChunk& chunk : plan.chunks) {
    add(fmt::format("{} {} {} [{}] [{}]", chunk.entry, chunk.rank, chunk.file,
                    fmt::join(chunk.offset, ","), fmt::join(chunk.sizes, ",")));
  }
  return crc;
}

FileChunk chunk_of(const PlannedChunk& planned, const StateEntry& entry) {
  const at::Tensor local = local_tensor(entry.tensor).detach();
  FileChunk chunk{.tensor = entry.stored.name,
                  .dtype = entry.tensor.scalar_type(),
                  .offset = planned.offset,
                  .sizes = planned.sizes,
                  .blocks = {}};
  for (const ChunkRows& part : planned.parts) {
    const at::Tensor block = local_block(local, Box{{}, part.local_offset, part.sizes});
    chunk.blocks.push_back({part.row, entry.stored.is_matrix_of_stack ? block.squeeze(0) : block});
  }
  return chunk;
}

std::vector<ShardFile> shard_files(const SavePlan& plan, const std::vector<StateEntry>& entries,
                                   int rank) {
  std::map<std::string, std::vector<FileChunk>> by_name;
  for (const PlannedChunk& planned : plan.chunks) {
    if (planned.rank == rank) {
      by_name[plan.file_name(planned)].push_back(chunk_of(planned, entries[planned.entry]));
    }
  }
  std::vector<ShardFile> files;
  for (auto& [name, chunks] : by_name) {
    files.push_back({name, std::move(chunks)});
  }
  return files;
}

/// Limits of an object's JSON state. The state may have 29 levels of nesting, because a manifest,
/// which contains the state, may have 32 levels.
constexpr JsonLimits kStateLimits{.depth = 29};

std::string text_of(const json& state) {
  return state.dump(-1, ' ', false, json::error_handler_t::replace);
}

bool survives_text(const json& state) {
  const json object = {{"state", state}};  // parse_strict_json() accepts only objects
  try {
    return tessera::detail::parse_strict_json(text_of(object), kStateLimits) == object;
  } catch (const Error&) {
    return false;
  }
}

/// Returns the JSON path of the first NaN or infinite number: "/loss/0"; "" if there is none.
std::string path_of_nonfinite(const json& state) {
  // nlohmann's items() keeps a reference to `flat`, so `flat` must not be a temporary object.
  const json flat = state.flatten();
  for (const auto& [path, value] : flat.items()) {
    if (value.is_number_float() && !std::isfinite(value.get<double>())) {
      return path.empty() ? "/" : path;
    }
  }
  return "";
}

void check_storable(const json& state, const std::string& what) {
  const std::string nonfinite = path_of_nonfinite(state);
  TESSERA_CHECK(nonfinite.empty(), what, ": the number at '", nonfinite,
                "' is NaN or infinite, which JSON cannot hold: save finite numbers or strings");
  TESSERA_CHECK(survives_text(state), what,
                " would change when it is saved and loaded as JSON: use finite numbers, UTF-8 "
                "strings, and at most ",
                kStateLimits.depth - 1, " levels of nesting");
}

template <class Object>
json checked_state(const std::string& name, const Object& object) {
  json state = object.state_dict();
  check_storable(state, "the state of '" + name + "'");
  return state;
}

/// Returns a text with the names of the saved objects. The text must be equal on all ranks. Throws
/// Error for a name that is empty or used twice.
std::string names_of_objects(const StateDict& state) {
  std::set<std::string> seen;
  std::string names;
  const auto add = [&](const std::string& name, const char* kind) {
    TESSERA_CHECK(!name.empty() && seen.insert(name).second, "the state has two objects named '",
                  name, "', or an object without a name: give each object a different name");
    check_storable(name, "the name of an object");
    names += text_of(name) + kind;
  };
  for (const auto& [name, object] : state.stateful) {
    add(name, " of all,");
  }
  for (const auto& [name, object] : state.rank_states) {
    add(name, object->persistent() ? " of each," : " not saved,");
  }
  return names;
}

/// Returns the states of this rank that are to be saved, by name. Throws Error for a state that
/// check_storable() rejects.
json own_rank_states(const std::vector<std::pair<std::string, RankState*>>& objects) {
  json states = json::object();
  for (const auto& [name, object] : objects) {
    if (object->persistent()) {
      states[name] = checked_state(name, *object);
    }
  }
  return states;
}

/// Combines the results of own_rank_states() of all ranks. The returned JSON object has, for each
/// name, a list with one state per rank.
json rank_state_lists(const std::vector<std::string>& of_ranks) {
  json lists = json::object();
  for (const std::string& text : of_ranks) {
    const json states = json::parse(text);
    for (const auto& [name, state] : states.items()) {
      lists[name].push_back(state);
    }
  }
  return lists;
}

void check_arguments(std::int64_t step, const StateDict& state, const SaveOptions& options) {
  TESSERA_CHECK(step >= 0, "a checkpoint cannot have step ", step, ": pass a step of 0 or more");
  TESSERA_CHECK(options.keep == 0 || options.keep >= 2, "keep is ", options.keep,
                ": keep 2 steps or more, because the newest step can be damaged, or pass 0 to keep "
                "all steps");
  TESSERA_CHECK(state.entries.is_object(), "the entries of a checkpoint are a JSON ",
                state.entries.type_name(), ": pass a JSON object");
  check_storable(state.entries, "the entries of a checkpoint");
  TESSERA_CHECK(is_run_id(options.run_id), "the run_id of ", options.run_id.size(),
                " bytes is not valid: use at most 200 printable ASCII characters");
}

void check_entries(const std::vector<StateEntry>& entries) {
  for (const StateEntry& entry : entries) {
    check_one_value(*entry.slot, entry.names.front());
    TESSERA_CHECK(find_dtype(entry.tensor.scalar_type()) != nullptr, "tensor '",
                  entry.names.front(), "' has the type ", c10::toString(entry.tensor.scalar_type()),
                  ", which safetensors lacks: convert the tensor first");
  }
}

/// Throws Error unless all ranks plan the same save. Otherwise ranks could write blocks that
/// contradict the manifest, or overwrite files of an older step.
void check_same_plan(comm::Communicator& hosts, std::int64_t own) {
  const auto others = comm::ranks_that_differ(hosts, c10::kCPU, own);
  TESSERA_CHECK(
      others.empty(), "ranks ", fmt::format("{}", fmt::join(others, ", ")),
      " differ from rank 0 in the names, sizes, types or meshes of the model, optimizer or "
      "objects, or in step, folder, run_id or keep: pass equal arguments on all ranks");
}

/// Returns the tensors whose copies on different ranks must be equal: parameters and optimizer
/// state. Buffers can differ, for example the running statistics of a norm.
std::vector<nn::detail::CopiedTensor> copied_tensors(const nn::ModuleBase& model,
                                                     const std::vector<StateEntry>& entries) {
  std::set<std::string> buffers;
  for (const NamedParameter& each : saved_slots(model)) {
    if (each.is_buffer) {
      buffers.insert(each.names.front());
    }
  }
  // A fused parameter has several entries, one for each part, but its tensor is compared only once.
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

/// Records the mesh of the first distributed tensor in the manifest, as information for users.
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

/// Returns, for each block in a file, the block's offset in the whole tensor, as metadata in the
/// format that PyTorch's HuggingFaceStorageReader requires.
std::string sharding_info(const ShardFile& file) {
  json info;
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
  SafetensorsWriter writer(folder / file.name, items,
                           {{"format", "pt"}, {"DCP_SHARDING_INFO", sharding_info(file)}}, &sums);
  for (const std::string& tensor : writer.names()) {
    write_chunk(writer, *by_name.at(tensor));
  }
  writer.finish();
  return {file.name, sums.bytes(), sums.sums()};
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
    for (const auto& [name, object] : state.stateful) {
      prepared.manifest.stateful[name] = checked_state(name, *object);
    }
    own_states = own_rank_states(state.rank_states).dump();
    copied = copied_tensors(state.model, entries);
  });
  check_same_plan(hosts, own);
  // If copies of a tensor differed between ranks, the files would contain a mixture of the copies.
  nn::detail::check_copies({&hosts, comm::ranks_of_world(hosts.size()), c10::kCPU}, copied,
                           {.what = "checkpoint::save"});
  if (!state.rank_states.empty()) {
    prepared.manifest.rank_states =
        rank_state_lists(comm::gather_texts(hosts, c10::kCPU, own_states));
  }
  return prepared;
}

std::vector<FileRecord> write_shards(const std::filesystem::path& folder,
                                     const std::vector<ShardFile>& files) {
  std::vector<FileRecord> records;
  for (const ShardFile& file : files) {
    records.push_back(write_shard(folder, file));
  }
  return records;
}

namespace {

std::string to_json_text(const std::vector<FileRecord>& records) {
  json list = json::array();
  for (const FileRecord& record : records) {
    list.push_back({record.name, record.bytes, record.sums});
  }
  return list.dump();
}

/// Copies the sizes and checksums of the files, which the ranks have sent as text, to the manifest.
void complete_files(Manifest& manifest, const std::vector<std::string>& of_ranks) {
  std::map<std::string, FileRecord*> by_name;
  for (FileRecord& file : manifest.files) {
    by_name.emplace(file.name, &file);
  }
  for (const std::string& of_rank : of_ranks) {
    for (const json& record : json::parse(of_rank)) {
      FileRecord& file = *by_name.at(record.at(0));
      record.at(1).get_to(file.bytes);
      record.at(2).get_to(file.sums);
    }
  }
}

/// Writes all files and commits the step. Rank 0 receives the sizes and checksums of all files.
/// Sets `committed` on rank 0 as soon as the step exists.
void write_and_commit(comm::Communicator& hosts, PreparedSave& save, bool& committed) {
  std::vector<FileRecord> records;
  run_or_fail_on_all(hosts, [&] { records = write_shards(save.folder.path(), save.files); });
  const auto of_ranks = comm::gather_texts(hosts, c10::kCPU, to_json_text(records));
  run_or_fail_on_all(hosts, [&] {
    if (hosts.rank() == 0) {
      complete_files(save.manifest, of_ranks);
      const std::string text = to_text(save.manifest);
      // The manifest is parsed first, so that a manifest that load() rejects is never committed.
      parse_manifest(text, save.folder.path() / kManifestFile);
      save.folder.commit(text);
      committed = true;
    }
  });
}

/// Removes the marker file of the completed save, and old steps. Errors of the removal are only
/// warnings: the step is complete, and only disk space is wasted.
void tidy_up(const StepFolder& folder, int keep) noexcept {
  try {
    folder.release();
    folder.clean_up_others(keep);
  } catch (const std::exception& error) {
    TORCH_WARN("the checkpoint was saved, but other checkpoints could not be removed: ",
               error.what());
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
    // The folder of the failed save is not removed: another rank may be writing to it or may have
    // committed the step. The next save removes an unfinished step.
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
