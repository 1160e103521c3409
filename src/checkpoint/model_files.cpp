// A model folder may come from an untrusted source, such as a download, so everything in the index
// is checked against the files.

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <system_error>

#include "format.h"
#include "manifest.h"
#include "model_files.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;
using WeightMap = std::map<std::string, std::string>;

/// The largest accepted size of an index, far above the size of any real index.
constexpr std::uint64_t kMaxIndexBytes = 100'000'000;

struct Index {
  WeightMap weight_map;  ///< maps the name of each tensor to the file name of its shard
  std::optional<std::uint64_t> total_size;
};

/// The name of a tensor as ASCII JSON, so that a message stays on one line and shows unusual
/// characters.
std::string quoted(const std::string& name) {
  return json(name).dump(-1, ' ', true);
}

/// Throws Error unless the name of the shard is a plain file name, not a path.
void check_shard_name(const std::string& name) {
  const bool path = name.empty() || name == "." || name.find("..") != std::string::npos ||
                    name.find_first_of("/\\") != std::string::npos;
  TESSERA_CHECK(!path && !has_control_character(name), "its shard ", quoted(name),
                " is not the name of a file in this folder");
}

/// Parses an index. total_size is optional, because only some exporters write it. Other metadata
/// are ignored.
Index parse_index(const json& root) {
  Index index;
  const auto map = root.find("weight_map");
  TESSERA_CHECK(map != root.end() && map->is_object(), "it has no object weight_map");
  for (const auto& [tensor, shard] : map->items()) {
    check_tensor_name(tensor);
    TESSERA_CHECK(shard.is_string(), "its weight_map gives no file name for ", quoted(tensor));
    check_shard_name(shard.get_ref<const std::string&>());
    index.weight_map.emplace(tensor, shard.get<std::string>());
  }
  const auto size = root.find("metadata") == root.end() || !root["metadata"].is_object()
                        ? json()
                        : root["metadata"].value("total_size", json());
  if (size.is_number_unsigned()) {
    index.total_size = size.get<std::uint64_t>();
  }
  return index;
}

/// Reads an index; each error message names the file.
Index read_index(const std::filesystem::path& path) {
  const std::string text = files::read_file(path, "an index of weights", kMaxIndexBytes);
  try {
    return parse_index(detail::parse_strict_json(text));
  } catch (const Error& error) {
    fail("the index '", path.string(), "' is not valid: ", error.what(),
         ": copy or write the model again");
  }
}

/// Throws Error for a broken link, which an incomplete download leaves in Hugging Face's cache.
void check_link(const std::filesystem::path& path) {
  std::error_code error;
  TESSERA_CHECK(!std::filesystem::is_symlink(path, error) || std::filesystem::exists(path, error),
                "'", path.string(), "' is a symbolic link to '",
                std::filesystem::read_symlink(path, error).string(),
                "', which is not there: download the model again (hf download), or correct the "
                "link");
}

/// The file to open for a shard. A link is followed only from a snapshot in a Hugging Face cache
/// into the blobs of the same model.
std::filesystem::path shard_path(const std::filesystem::path& folder, const std::string& name) {
  auto path = folder / name;
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) {
    return path;
  }
  check_link(path);
  const auto target = std::filesystem::canonical(path, error);
  const auto snapshot = std::filesystem::canonical(folder, error);
  // In a Hugging Face cache, a snapshot is a folder of links from
  // models--NAME/snapshots/REVISION/FILE to models--NAME/blobs/HASH.
  const bool cached = !error && snapshot.parent_path().filename() == "snapshots" &&
                      target.parent_path() == snapshot.parent_path().parent_path() / "blobs";
  return cached ? target : path;
}

/// The number of bytes of the tensors in a file, which total_size of the index includes.
std::uint64_t bytes_of(const SafetensorsFile& file) {
  std::uint64_t bytes = 0;
  for (const auto& [name, entry] : file.tensors()) {
    bytes += entry.bytes;
  }
  return bytes;
}

}  // namespace

ModelFiles::ModelFiles(const std::filesystem::path& folder) : folder_(folder) {
  TESSERA_CHECK(std::filesystem::is_directory(folder), "there is no model folder '",
                folder.string(), "': give a folder with config.json and ", kSingleFile);
  TESSERA_CHECK(!std::filesystem::exists(folder / kAdapterConfig), "the model folder '",
                folder.string(), "' has ", kAdapterConfig,
                ", by which other programs load the adapter and the model that it names instead: "
                "give a folder without, or move the adapter away");
  for (const char* name : {kSingleFile, kIndexFile}) {
    check_link(folder / name);
  }
  const bool single = std::filesystem::exists(folder / kSingleFile);
  if (!single) {
    refuse_torch_checkpoint(folder);
  }
  TESSERA_CHECK(single || std::filesystem::exists(folder / kIndexFile), "the model folder '",
                folder.string(), "' has neither ", kSingleFile, " nor ", kIndexFile,
                ": give the folder of a Hugging Face model in safetensors format");
  // A folder may have both a single file and an index; `transformers` also prefers the single file.
  single ? open_single() : open_index();
}

void ModelFiles::open_single() {
  const auto& file = files_.emplace_back(folder_ / kSingleFile);
  for (const auto& [name, entry] : file.tensors()) {
    tensors_.emplace(name, &file);
  }
}

void ModelFiles::open_index() {
  const auto path = folder_ / kIndexFile;
  const auto index = read_index(path);
  const auto& weight_map = index.weight_map;
  std::map<std::string, const SafetensorsFile*> shards;
  std::uint64_t bytes = 0;
  for (const auto& [tensor, shard] : weight_map) {
    if (shards.contains(shard)) {
      continue;
    }
    // Symlinks::kRefuse is used, because shard_path() has already resolved every permitted link.
    const auto& file = files_.emplace_back(shard_path(folder_, shard), Symlinks::kRefuse);
    shards.emplace(shard, &file);
    bytes += bytes_of(file);
    // A tensor that the index assigns to another shard is allowed here, as an outdated copy.
    for (const auto& [name, entry] : file.tensors()) {
      TESSERA_CHECK(weight_map.contains(name), "tensor '", name, "' is in '", file.path().string(),
                    "', but the index '", path.string(),
                    "' does not list it: copy or write the model again");
    }
  }
  // The reverse is checked, too: entry() throws for a tensor that the index lists and the shard
  // lacks.
  for (const auto& [tensor, shard] : weight_map) {
    shards.at(shard)->entry(tensor);
    tensors_.emplace(tensor, shards.at(shard));
  }
  // total_size is only compared; reads use the sizes in the header of each shard.
  if (index.total_size && *index.total_size != bytes) {
    TORCH_WARN("the index '", path.string(), "' claims ", *index.total_size,
               " bytes of tensors, but its shards hold ", bytes, ", which are read");
  }
}

}  // namespace tessera::checkpoint
