#pragma once

#include <filesystem>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// What the name of a model on Hugging Face's hub stands for in a program's flag.
enum class HubItem {
  kModel,      ///< the folder of a model, with its config.json
  kConfig,     ///< the file config.json of a model
  kTokenizer,  ///< the folder of a model, with its tokenizer.json or tokenizer.model
};

/// Returns the folder of Hugging Face's hub cache: HF_HUB_CACHE, else HUGGINGFACE_HUB_CACHE, else
/// HF_HOME/hub. HF_HOME is by default `huggingface` in XDG_CACHE_HOME or ~/.cache. As in
/// `huggingface_hub`, "~" and variables in these values are expanded. The folder may not exist.
std::filesystem::path hub_cache();

/// Returns the path for a name in a program's flag. Existing files and folders are returned
/// unchanged, and so is a text that is not a model's name on the hub ("org/name" or "name",
/// optionally followed by "@revision", default main). For a model's name, returns its snapshot
/// folder in the hub cache, or a file in it. Nothing is downloaded. A name without "org/" that is
/// not in the cache is returned as is. Throws Error if the cache lacks the model.
std::string hub_path(const std::string& name, HubItem item);

/// Throws Error for a snapshot in the hub cache whose weights are incomplete, with the name of the
/// first missing file. Does nothing for folders outside of the hub cache.
void check_hub_weights(const std::filesystem::path& folder);

}  // namespace tessera
TESSERA_API_END
