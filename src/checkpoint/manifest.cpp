// A manifest is one JSON object. The last member is the CRC-32C of all preceding text. For shards
// from PyTorch, Tessera makes a manifest from the headers.

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <set>
#include <utility>

#include "format.h"
#include "manifest.h"
#include "step_folder.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

/// The maximum number of comparisons between the stored blocks (chunks) of one tensor. The limit
/// bounds the time for an untrusted manifest.
constexpr std::size_t kMostComparisons = 40'000'000;

/// Returns the dimension with the largest number of different chunk offsets. If the chunks are
/// sorted by this dimension, the fewest pairs of chunks must be compared.
std::size_t widest_dim(const ManifestTensor& tensor) {
  std::size_t widest = 0;
  std::size_t most = 0;
  for (std::size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    std::set<std::int64_t> begins;
    for (const ManifestChunk& chunk : tensor.chunks) {
      begins.insert(chunk.offset[dim]);
    }
    if (begins.size() > most) {
      widest = dim;
      most = begins.size();
    }
  }
  return widest;
}

/// Throws Error unless the chunks (stored blocks) cover each element of the tensor exactly once.
/// Chunks are sorted by offset, so that few pairs are compared.
void check_tiling(const ManifestTensor& tensor) {
  tensor_bytes(tensor.sizes, *find_dtype(tensor.dtype));  // throws if the sizes overflow
  const std::int64_t all = product(tensor.sizes);
  std::int64_t elements = 0;
  for (const ManifestChunk& chunk : tensor.chunks) {
    TESSERA_CHECK(product(chunk.sizes) <= all - elements,
                  "its chunks have more elements than the tensor, which has ", all);
    elements += product(chunk.sizes);
  }
  TESSERA_CHECK(elements == all, "its chunks have ", elements, " elements, not ", all);
  if (tensor.sizes.empty()) {
    return;
  }
  const std::size_t dim = widest_dim(tensor);
  std::vector<const ManifestChunk*> order;
  for (const ManifestChunk& chunk : tensor.chunks) {
    order.push_back(&chunk);
  }
  std::ranges::sort(order, {}, [dim](const auto* chunk) { return chunk->offset[dim]; });
  std::size_t comparisons = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const ManifestChunk& one = *order[i];
    for (std::size_t j = i + 1;
         j < order.size() && order[j]->offset[dim] < one.offset[dim] + one.sizes[dim]; ++j) {
      comparisons += tensor.sizes.size();
      TESSERA_CHECK(comparisons <= kMostComparisons, "its ", order.size(),
                    " chunks take more than ", kMostComparisons,
                    " comparisons to check for overlaps");
      TESSERA_CHECK(!common_block(one.offset, one.sizes, order[j]->offset, order[j]->sizes),
                    "two of its chunks overlap");
    }
  }
}

constexpr int kVersion = 1;
/// The largest accepted size of a manifest: a hundred times the manifest of a model with 400
/// billion parameters.
constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 32;
constexpr JsonLimits kManifestLimits{.depth = 32, .keys = 50'000'000, .values = 200'000'000};

/// Whether a file has the name of a saved shard: "shard-00000-model-00001-of-00002.safetensors".
bool is_shard_name(std::string_view name) {
  constexpr std::string_view kForm = "shard-#####-model-#####-of-#####.safetensors";
  return std::ranges::equal(name, kForm, [](char c, char form) {
    return form == '#' ? c >= '0' && c <= '9' : c == form;
  });
}

std::string hex(std::uint32_t number) {
  return fmt::format("{:08x}", number);
}

std::uint32_t parse_hex(std::string_view text) {
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.begin(), text.end(), number, 16);
  const bool lower = std::ranges::none_of(text, [](unsigned char c) { return std::isupper(c); });
  TESSERA_CHECK(error == std::errc() && end == text.end() && text.size() == 8 && lower,
                "a checksum is not eight lowercase hexadecimal digits");
  return number;
}

std::string ending(std::string_view body) {
  return ",\"crc32c\":\"" + hex(tessera::detail::crc32c(std::as_bytes(std::span(body)))) + "\"}\n";
}

json file_json(const FileRecord& file) {
  std::string sums;
  for (const std::uint32_t sum : file.sums) {
    sums += hex(sum);
  }
  return {{"name", file.name}, {"bytes", file.bytes}, {"crc32c", sums}};
}

json tensor_json(const ManifestTensor& tensor) {
  json chunks = json::array();
  for (const ManifestChunk& chunk : tensor.chunks) {
    chunks.push_back({{"file", chunk.file}, {"offsets", chunk.offset}, {"sizes", chunk.sizes}});
  }
  json object = {{"dtype", tensor.dtype}, {"sizes", tensor.sizes}, {"chunks", chunks}};
  if (!tensor.tied.empty()) {
    object["tied"] = tensor.tied;
  }
  return object;
}

FileRecord parse_file(const json& value, Checksums checksums) {
  const auto bytes = natural_number(value.at("bytes"), "the size of a file");
  FileRecord file{value.at("name"), static_cast<std::uint64_t>(bytes), {}};
  TESSERA_CHECK(is_shard_name(file.name), "it lists the file ", ascii(file.name),
                ", which is not the name of a shard");
  const auto& sums = value.at("crc32c").get_ref<const std::string&>();
  const bool optional = checksums == Checksums::kOptional || file.bytes == 0;
  TESSERA_CHECK(optional || !sums.empty(), "file '", file.name, "' has no checksums");
  TESSERA_CHECK(sums.empty() || sums.size() == 8 * granules_of(file.bytes), "file '", file.name,
                "' has a number of checksums that does not fit the size of the file");
  for (std::size_t i = 0; i < sums.size(); i += 8) {
    file.sums.push_back(parse_hex(std::string_view(sums).substr(i, 8)));
  }
  return file;
}

ManifestTensor parse_tensor(const json& value, std::size_t files) {
  ManifestTensor tensor{value.at("dtype"), natural_numbers(value.at("sizes"), "its sizes"), {}, {}};
  TESSERA_CHECK(find_dtype(tensor.dtype) != nullptr, "its dtype '", tensor.dtype, "' is unknown");
  if (value.contains("tied")) {
    tensor.tied = value.at("tied");
  }
  std::ranges::for_each(tensor.tied, check_tensor_name);
  for (const json& each : value.at("chunks")) {
    const auto file = natural_number(each.at("file"), "the file of a chunk");
    ManifestChunk chunk{static_cast<std::size_t>(file),
                        natural_numbers(each.at("offsets"), "a chunk's offsets"),
                        natural_numbers(each.at("sizes"), "a chunk's sizes")};
    TESSERA_CHECK(chunk.file < files, "a chunk is in file ", chunk.file, " of ", files);
    check_block(tensor.sizes, chunk.offset, chunk.sizes);
    tensor.chunks.push_back(std::move(chunk));
  }
  check_tiling(tensor);
  return tensor;
}

void parse_objects(Manifest& manifest, const json& root) {
  manifest.stateful = root.value("stateful", json::object());
  manifest.rank_states = root.value("rank_states", json::object());
  TESSERA_CHECK(manifest.stateful.is_object() && manifest.rank_states.is_object(),
                "\"stateful\" or \"rank_states\" is not a JSON object");
  manifest.dropout_calls = root.value("dropout_calls", json::object());
  TESSERA_CHECK(manifest.dropout_calls.is_object(), "\"dropout_calls\" is not a JSON object");
  for (const auto& [name, calls] : manifest.dropout_calls.items()) {
    natural_number(calls, "a number of calls");
  }
  for (const auto& [name, states] : manifest.rank_states.items()) {
    TESSERA_CHECK(states.is_array() && std::cmp_equal(states.size(), manifest.world_size),
                  "\"rank_states\" of '", name, "' must be a list of one state for each of the ",
                  manifest.world_size, " ranks that saved");
  }
}

Manifest from_json(const json& root, Checksums checksums) {
  TESSERA_CHECK(root.at("format") == "tessera-checkpoint",
                "its format is not \"tessera-checkpoint\"");
  TESSERA_CHECK(root.at("version") == kVersion, "its version is ", root.at("version").dump(),
                ", but this program reads only version ", kVersion);
  Manifest manifest;
  manifest.run_id = root.at("run_id");
  manifest.step = natural_number(root.at("step"), "the step");
  const auto ranks = natural_number(root.at("world_size"), "world_size");
  TESSERA_CHECK(std::in_range<int>(ranks), "world_size is ", ranks, ", which is too large");
  manifest.world_size = static_cast<int>(ranks);
  manifest.mesh_sizes = natural_numbers(root.at("mesh").at("sizes"), "the mesh");
  manifest.mesh_names = root.at("mesh").at("names").get<std::vector<std::string>>();
  manifest.entries = root.at("entries");
  TESSERA_CHECK(manifest.entries.is_object(), "\"entries\" is not a JSON object");
  parse_objects(manifest, root);
  std::set<std::string> names;
  for (const json& file : root.at("files")) {
    manifest.files.push_back(parse_file(file, checksums));
    TESSERA_CHECK(names.insert(manifest.files.back().name).second, "it names '",
                  manifest.files.back().name, "' twice");
  }
  for (const auto& [name, value] : root.at("tensors").items()) {
    check_tensor_name(name);  // error messages may contain `name` only after this check
    try {
      manifest.tensors.emplace(name, parse_tensor(value, manifest.files.size()));
    } catch (const Error& error) {
      fail("tensor '", name, "': ", error.what());
    }
  }
  return manifest;
}

}  // namespace

std::optional<Box> common_block(std::span<const std::int64_t> offset,
                                std::span<const std::int64_t> sizes,
                                std::span<const std::int64_t> other_offset,
                                std::span<const std::int64_t> other_sizes) {
  Box box;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    const std::int64_t begin = std::max(offset[dim], other_offset[dim]);
    const std::int64_t end =
        std::min(offset[dim] + sizes[dim], other_offset[dim] + other_sizes[dim]);
    if (begin >= end) {
      return std::nullopt;
    }
    box.global_offset.push_back(begin);
    box.local_offset.push_back(begin - other_offset[dim]);
    box.sizes.push_back(end - begin);
  }
  return box;
}

std::string to_text(const Manifest& manifest) {
  json root;
  root["format"] = "tessera-checkpoint";
  root["version"] = kVersion;
  root["run_id"] = manifest.run_id;
  root["step"] = manifest.step;
  root["world_size"] = manifest.world_size;
  root["mesh"] = {{"sizes", manifest.mesh_sizes}, {"names", manifest.mesh_names}};
  root["entries"] = manifest.entries;
  if (!manifest.stateful.empty()) {
    root["stateful"] = manifest.stateful;
  }
  if (!manifest.rank_states.empty()) {
    root["rank_states"] = manifest.rank_states;
  }
  if (!manifest.dropout_calls.empty()) {
    root["dropout_calls"] = manifest.dropout_calls;
  }
  root["files"] = json::array();
  for (const FileRecord& file : manifest.files) {
    root["files"].push_back(file_json(file));
  }
  root["tensors"] = json::object();
  for (const auto& [name, tensor] : manifest.tensors) {
    root["tensors"][name] = tensor_json(tensor);
  }
  std::string text = root.dump();
  text.pop_back();  // the checksum is inserted before the manifest's last brace
  return text + ending(text);
}

bool is_as_written(std::string_view text) {
  const std::size_t length = ending("").size();
  return text.size() > length &&
         text.substr(text.size() - length) == ending(text.substr(0, text.size() - length));
}

Manifest parse_manifest(const std::string& text, const std::filesystem::path& path,
                        Checksums checksums) {
  try {
    TESSERA_CHECK(text.size() > ending("").size(), "it has only ", text.size(), " bytes");
    TESSERA_CHECK(is_as_written(text), "its bytes changed after the save (CRC-32C)");
    try {
      return from_json(tessera::detail::parse_strict_json(text, kManifestLimits), checksums);
    } catch (const json::exception& error) {
      fail(error.what());
    }
  } catch (const Error& error) {
    fail("the manifest '", path.string(), "' is not valid: ", error.what(),
         ": copy the step again, or load another step");
  }
}

std::string read_manifest_text(const std::filesystem::path& folder) {
  return files::read_file(folder / kManifestFile, "the manifest of a checkpoint", kMaxManifestBytes,
                          files::Symlinks::kRefuse);
}

Manifest read_manifest(const std::filesystem::path& folder) {
  return parse_manifest(read_manifest_text(folder), folder / kManifestFile);
}

namespace {

std::vector<std::string> shards_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (is_shard_name(entry.path().filename().string())) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::ranges::sort(names);
  return names;
}

std::vector<std::int64_t> offsets_of(const std::string& tensor, const nlohmann::json& info) {
  try {
    return natural_numbers(info.at("saved_offsets"), "its saved_offsets");
  } catch (const Error& error) {
    fail("tensor '", tensor, "': ", error.what());
  }
}

/// Adds the blocks of one shard file to a manifest. The file does not contain the tensor's full
/// size. The largest end of all blocks determines the size.
void add_blocks(Manifest& manifest, const SafetensorsFile& file) {
  const auto metadata = file.metadata().find("DCP_SHARDING_INFO");
  TESSERA_CHECK(metadata != file.metadata().end(), "its metadata have no key DCP_SHARDING_INFO");
  const nlohmann::json info = tessera::detail::parse_strict_json(metadata->second);
  for (const auto& [name, entry] : file.tensors()) {
    TESSERA_CHECK(info.contains(name), "its DCP_SHARDING_INFO has no tensor '", name, "'");
    ManifestChunk chunk{manifest.files.size(), offsets_of(name, info[name]), entry.sizes};
    ManifestTensor& tensor = manifest.tensors[name];
    TESSERA_CHECK(chunk.offset.size() == chunk.sizes.size() &&
                      (tensor.chunks.empty() || (tensor.dtype == entry.dtype_name &&
                                                 tensor.sizes.size() == chunk.sizes.size())),
                  "the number of dimensions or the type of tensor '", name,
                  "' does not match its offsets or its blocks in other files");
    tensor.dtype = entry.dtype_name;
    tensor.sizes.resize(chunk.sizes.size());
    for (std::size_t dim = 0; dim < chunk.sizes.size(); ++dim) {
      std::int64_t end = 0;
      TESSERA_CHECK(!__builtin_add_overflow(chunk.offset[dim], chunk.sizes[dim], &end), "tensor '",
                    name, "' begins at ", chunk.offset[dim], ", so its end overflows 64 bits");
      tensor.sizes[dim] = std::max(tensor.sizes[dim], end);
    }
    tensor.chunks.push_back(std::move(chunk));
  }
}

/// Whether a save by Tessera wrote a shard. The metadata of a shard from PyTorch's writer contain
/// DCP_VERSION, the version of the writer.
bool is_of_a_save(const SafetensorsFile& file) {
  return file.metadata().contains("format") && !file.metadata().contains("DCP_VERSION");
}

}  // namespace

bool has_torch_hf_shards(const std::filesystem::path& folder) {
  std::error_code error;
  return !std::filesystem::exists(folder / kManifestFile, error) && !is_marked(folder) &&
         !shards_in(folder).empty();
}

void refuse_torch_checkpoint(const std::filesystem::path& folder) {
  std::error_code error;
  TESSERA_CHECK(
      !std::filesystem::exists(folder / ".metadata", error), "'", folder.string(),
      "' is a checkpoint of torch.distributed.checkpoint; only PyTorch can read the pickles in its "
      ".metadata and .distcp files: convert the checkpoint with from_torch_checkpoint.py "
      "(installed next to tessera-ckpt), and load the result (docs/checkpoints.md)");
}

Manifest manifest_of_shards(const std::filesystem::path& folder) {
  Manifest manifest;
  bool of_a_save = false;
  for (const std::string& name : shards_in(folder)) {
    const SafetensorsFile file(folder / name, Symlinks::kRefuse);
    try {
      add_blocks(manifest, file);
    } catch (const nlohmann::json::exception& error) {
      fail("'", (folder / name).string(),
           "' has a DCP_SHARDING_INFO that is not valid: ", error.what(), ": write the file again");
    } catch (const Error& error) {
      fail("'", (folder / name).string(), "' is not a shard of a checkpoint: ", error.what(),
           ": write the file again with save_distributed");
    }
    of_a_save = of_a_save || is_of_a_save(file);
    manifest.files.push_back({name, std::filesystem::file_size(folder / name), {}});
  }
  for (const auto& [name, tensor] : manifest.tensors) {
    try {
      check_tiling(tensor);
    } catch (const Error& error) {
      fail("the shards in '", folder.string(), "' are not complete: tensor '", name,
           "': ", error.what(), ": copy all shards");
    }
  }
  TESSERA_CHECK(!of_a_save, "'", folder.string(), "' has the shards of a step but no ",
                kManifestFile, ", so missing shards cannot be detected: copy the whole folder");
  return manifest;
}

Manifest manifest_in(const std::filesystem::path& folder) {
  return has_torch_hf_shards(folder) ? manifest_of_shards(folder) : read_manifest(folder);
}

}  // namespace tessera::checkpoint
