// The small files beside a model's weights that define its tokenizer.

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Far above that of any tokenizer.
constexpr std::uint64_t kMaxBytes = 500'000'000;

/// The names that transformers gives them. Templates beside the first one have a folder.
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

/// Links count, whether they lead to a file or not.
FilesBesideWeights files_in(const fs::path& folder) {
  FilesBesideWeights files;
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

FilesBesideWeights files_beside_weights(const fs::path& model) {
  FilesBesideWeights files = files_in(model);
  for (const auto& [name, path] : files) {
    TESSERA_CHECK(fs::exists(path), "'", path.string(),
                  "' is a symbolic link to a file that is not there: put the file there, or remove "
                  "the link");
  }
  return files;
}

void check_beside_weights(const FilesBesideWeights& files, const fs::path& folder) {
  for (const auto& [name, path] : files_in(folder)) {
    TESSERA_CHECK(files.contains(name), "the folder '", folder.string(), "' has ", name,
                  ", which the model that is exported lacks, and which would stay beside its "
                  "weights; export to another folder, or remove that file first");
  }
  for (const auto& [name, source] : files) {
    const std::string content = content_of(source);
    TESSERA_CHECK(!fs::exists(folder / name) || content_of(folder / name) == content,
                  "the folder '", folder.string(), "' has another ", name, " than '",
                  source.string(),
                  "', which cannot be replaced together with the weights; export to another "
                  "folder, or remove that model first");
  }
}

void copy_beside_weights(const FilesBesideWeights& files, const fs::path& folder) {
  check_beside_weights(files, folder);
  for (const auto& [name, source] : files) {
    if (!fs::exists(folder / name)) {
      files::create_folders((folder / name).parent_path());
      files::write_file(folder / name, content_of(source));
    }
  }
}

}  // namespace tessera::checkpoint
