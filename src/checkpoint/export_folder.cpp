#include <ATen/ops/isinf.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <random>
#include <regex>
#include <set>
#include <system_error>

#include "format.h"
#include "model_folder.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

bool is_computed_from(const std::string& key) {
  constexpr std::array<std::string_view, 8> kNoComputation = {
      "torch_dtype", "dtype",        "transformers_version", "_name_or_path",
      "use_cache",   "bos_token_id", "eos_token_id",         "pad_token_id"};
  return std::ranges::find(kNoComputation, key) == kNoComputation.end();
}

}  // namespace

std::string config_change(const std::string& before, const std::string& now) {
  const json one = json::parse(before), other = json::parse(now);
  json keys = one;
  keys.update(other);
  for (const auto& [key, unused] : keys.items()) {
    const json from = one.value(key, json());
    const json to = other.value(key, json());
    if (from != to && is_computed_from(key)) {
      return fmt::format("\"{}\" is {} instead of {}", key, to.dump(), from.dump());
    }
  }
  return "";
}

namespace {

using Item = SafetensorsWriter::Item;
using nlohmann::ordered_json;

constexpr const char* kConfigFile = "config.json";
/// The largest accepted size of config.json, far above the size of any real config.json.
constexpr std::uint64_t kMaxConfigBytes = 10'000'000;

/// Whether a file name is the name of a shard that an export wrote. The pattern is narrow, because
/// other files in the folder belong to the user.
bool is_shard(const std::string& name) {
  static const std::regex shard(R"(model-([0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors)");
  return std::regex_match(name, shard);
}

std::int64_t bytes_of(const Item& item) {
  return product(item.sizes) * static_cast<std::int64_t>(c10::elementSize(item.dtype));
}

/// Distributes tensors to shard files in order. A tensor that would make a shard larger than
/// `limit` bytes begins a new shard. A larger tensor gets its own shard.
std::vector<std::vector<Item>> split_in_shards(const std::vector<Item>& items, std::int64_t limit) {
  std::vector<std::vector<Item>> shards(1);
  std::int64_t bytes = 0;
  for (const auto& item : items) {
    if (!shards.back().empty() && bytes + bytes_of(item) > limit) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += bytes_of(item);
    shards.back().push_back(item);
  }
  return shards;
}

std::filesystem::path existing_part(const std::filesystem::path& folder) {
  std::filesystem::path existing = std::filesystem::absolute(folder);
  std::error_code error;
  while (!std::filesystem::exists(existing, error)) {
    existing = existing.parent_path();
  }
  return existing;
}

ordered_json parsed(const std::string& text) {
  return ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
}

const char* torch_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kDouble:
      return "float64";
    case c10::kFloat:
      return "float32";
    case c10::kBFloat16:
      return "bfloat16";
    case c10::kHalf:
      return "float16";
    default:
      fail("weights can't be exported as ", c10::toString(dtype),
           ": choose Float, Double, BFloat16 or Half");
  }
}

/// Throws Error if the folder has a different `config_file`. Weights and configuration cannot be
/// replaced together atomically, so a reader could combine old weights with a new configuration.
void check_same_config(const std::filesystem::path& folder, const std::string& config_json,
                       const char* config_file) {
  const std::filesystem::path path = folder / config_file;
  if (!std::filesystem::exists(path)) {
    return;
  }
  const std::string text = files::read_file(path, "a model configuration", kMaxConfigBytes);
  const bool same =
      text == config_json || nlohmann::json(parsed(text)) == nlohmann::json(parsed(config_json));
  TESSERA_CHECK(same, "the folder '", folder.string(), "' has a different ", config_file,
                " than the exported model; configuration and weights cannot be replaced in one "
                "step: export to another folder, or remove the old model");
}

/// Throws Error if the folder would contain both a model and an adapter, because a reader of such a
/// folder could load the wrong one of the two.
void check_no_other_kind(const std::filesystem::path& folder, bool adapter) {
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename().string();
    const bool of_model =
        name == kConfigFile || name == kSingleFile || name == kIndexFile || is_shard(name);
    const bool of_adapter = name == kAdapterConfig || name == kAdapterFile;
    TESSERA_CHECK(adapter ? !of_model : !of_adapter, "the folder '", folder.string(), "' has ",
                  name, " of ", adapter ? "a model" : "an adapter",
                  ", and a program that reads a folder with both a model and an adapter could load "
                  "the wrong files; export to another folder");
  }
}

/// Throws Error if the conversion of a weight to fp16 has overflowed, because a model with infinite
/// weights computes NaN.
void check_range_of_half(const std::string& name, const at::Tensor& block) {
  TESSERA_CHECK(block.scalar_type() != c10::kHalf || !at::isinf(block).any().item<bool>(),
                "the weight '", name,
                "' has values beyond 65504, the largest value of fp16; export as "
                "bf16 or fp32");
}

}  // namespace

void check_export_folder(const std::filesystem::path& folder, const std::string& config_json,
                         std::int64_t bytes, const char* config_file) {
  const std::filesystem::path existing = existing_part(folder);
  const bool is_folder = std::filesystem::is_directory(existing);
  TESSERA_CHECK(is_folder && access(existing.c_str(), W_OK) == 0, "cannot export to '",
                folder.string(), "': ", existing.string(),
                is_folder ? " is not writable" : " is not a folder", "; pass another folder");
  check_no_other_kind(folder, config_file == std::string_view(kAdapterConfig));
  check_same_config(folder, config_json, config_file);
  std::error_code error;
  const auto space = std::filesystem::space(existing, error);
  TESSERA_CHECK(error || static_cast<std::uintmax_t>(bytes) <= space.available, "the export to '",
                folder.string(), "' takes ", bytes, " bytes, but the disk has room for ",
                space.available, "; make room or pass a folder on another disk");
}

std::string config_of_weights(const std::string& config_json, c10::ScalarType dtype) {
  ordered_json config = parsed(config_json);
  const std::string name = torch_name(dtype);
  bool named = false, changed = false;
  for (const char* key : {"torch_dtype", "dtype"}) {
    if (config.is_object() && config.contains(key)) {
      named = true;
      changed = changed || config[key] != name;
      config[key] = name;
    }
  }
  // The dtype of the weights is added to config.json only if that dtype is not fp32: readers assume
  // fp32 if config.json names no dtype.
  if (config.is_object() && !named && dtype != c10::kFloat) {
    config["torch_dtype"] = name;
    changed = true;
  }
  return changed ? config.dump(2) + "\n" : config_json;
}

std::int64_t bytes_of_all(const std::vector<Item>& items) {
  std::int64_t bytes = 0;
  for (const Item& item : items) {
    bytes += bytes_of(item);
  }
  return bytes;
}

ExportFolder::ExportFolder(const std::filesystem::path& folder, const std::vector<Item>& items,
                           std::string config_json, std::int64_t max_shard_bytes)
    : folder_(folder), config_json_(std::move(config_json)) {
  files::create_folders(folder);
  // Removes temporary files of killed exports. A later export does not overwrite these files,
  // because each export uses new shard names.
  files::remove_leftovers(
      folder, [](const std::string& name) { return is_shard(name) || name == kIndexFile; });
  const auto shards = split_in_shards(items, max_shard_bytes);
  const std::string prefix = shard_prefix();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    names_.push_back(shards.size() == 1 ? kSingleFile
                                        : fmt::format("{}{:05}-of-{:05}.safetensors", prefix, i + 1,
                                                      shards.size()));
    writers_.emplace_back(folder / names_.back(), shards[i]);
    for (const auto& item : shards[i]) {
      shard_of_[item.name] = i;
      total_bytes_ += bytes_of(item);
    }
  }
}

void ExportFolder::write(const std::string& name, std::span<const std::int64_t> offset,
                         const at::Tensor& block) {
  check_range_of_half(name, block);
  writers_[shard_of_.at(name)].write(name, offset, block);
}

void ExportFolder::publish() {
  // All files are synced to disk before publish() gives the first file its final name.
  for (auto& writer : writers_) {
    writer.seal();
  }
  for (auto& writer : writers_) {
    writer.publish();
  }
  if (writers_.size() > 1) {
    files::write_file(folder_ / kIndexFile, index_json());
    remove(kSingleFile);  // readers prefer model.safetensors to the index
  } else {
    remove(kIndexFile);
  }
  remove_older_shards();
  // config.json is written last, because a folder with config.json counts as a model. An existing
  // config.json has the same content: check_export_folder() has compared the content.
  if (!std::filesystem::exists(folder_ / kConfigFile)) {
    files::write_file(folder_ / kConfigFile, config_json_);
  }
}

/// Returns the prefix of the names of this export's shard files: "model-" for the first model in
/// the folder, "model-" and a random number for each later model.
std::string ExportFolder::shard_prefix() const {
  bool first = true;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder_, ignored)) {
    first &= !entry.path().filename().string().starts_with("model-");
  }
  return first ? "model-" : fmt::format("model-{:08x}-", std::random_device()());
}

/// Returns the text of the index file. Tensor names are sorted, as `transformers` sorts them.
std::string ExportFolder::index_json() const {
  ordered_json index;
  index["metadata"]["total_size"] = total_bytes_;
  std::map<std::string, std::string> weight_map;
  for (const auto& [name, shard] : shard_of_) {
    weight_map[name] = names_[shard];
  }
  index["weight_map"] = weight_map;
  return index.dump(2) + "\n";
}

void ExportFolder::remove(const std::string& name) const {
  if (std::filesystem::remove(folder_ / name)) {
    files::sync_folder(folder_);
  }
}

/// Removes the shard files of earlier exports, including killed exports.
void ExportFolder::remove_older_shards() const {
  std::set<std::string> older;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    const auto name = entry.path().filename().string();
    if (is_shard(name)) {
      older.insert(name);
    }
  }
  for (const auto& name : names_) {
    older.erase(name);
  }
  for (const auto& name : older) {
    remove(name);
  }
}

namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMaxBytes = 500'000'000;

constexpr std::array kNames = {"tokenizer.json",
                               "tokenizer.model",
                               "tokenizer_config.json",
                               "special_tokens_map.json",
                               "added_tokens.json",
                               "vocab.json",
                               "merges.txt",
                               "chat_template.jinja",
                               "generation_config.json"};
constexpr const char* kTemplates = "additional_chat_templates";

std::string content_of(const fs::path& path) {
  return files::read_file(path, "a file of a model", kMaxBytes);
}

/// Returns the files in a model folder other than weights and configuration. Symbolic links are
/// listed even if their target does not exist.
std::map<std::string, fs::path> files_in(const fs::path& folder) {
  std::map<std::string, fs::path> files;
  for (const char* name : kNames) {
    if (fs::exists(fs::symlink_status(folder / name))) {
      files.emplace(name, folder / name);
    }
  }
  if (fs::is_directory(folder / kTemplates)) {
    for (const auto& entry : fs::directory_iterator(folder / kTemplates)) {
      if (entry.path().extension() == ".jinja") {
        files.emplace(fs::path(kTemplates) / entry.path().filename(), entry.path());
      }
    }
  }
  return files;
}

}  // namespace

std::map<std::string, fs::path> other_files(const fs::path& model) {
  std::map<std::string, fs::path> files = files_in(model);
  for (const auto& [name, path] : files) {
    TESSERA_CHECK(fs::exists(path), "'", path.string(),
                  "' is a symbolic link to a missing file: restore the file, or remove the link");
  }
  return files;
}

void check_other_files(const std::map<std::string, fs::path>& files, const fs::path& folder) {
  for (const auto& [name, path] : files_in(folder)) {
    TESSERA_CHECK(files.contains(name), "the folder '", folder.string(), "' has the file ", name,
                  ", but the exported model does not; readers would combine the old file with the "
                  "new weights: export to another folder, or remove the old file");
  }
  for (const auto& [name, source] : files) {
    const std::string content = content_of(source);
    TESSERA_CHECK(!fs::exists(folder / name) || content_of(folder / name) == content,
                  "the folder '", folder.string(), "' has a file ", name, " that differs from '",
                  source.string(),
                  "'; this file and the weights cannot be replaced in one step: export to another "
                  "folder, or remove the old model");
  }
}

void copy_other_files(const std::map<std::string, fs::path>& files, const fs::path& folder) {
  check_other_files(files, folder);
  for (const auto& [name, source] : files) {
    if (!fs::exists(folder / name)) {
      files::create_folders((folder / name).parent_path());
      files::write_file(folder / name, content_of(source));
    }
  }
}

}  // namespace tessera::checkpoint
