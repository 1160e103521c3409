#pragma once

#include <filesystem>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The kind of item that a name refers to.
enum class HubItem {
  kModel,      ///< the folder of a model, with its config.json
  kConfig,     ///< the file config.json of a model
  kTokenizer,  ///< the folder of a model, with its tokenizer.json or tokenizer.model
};

/// The folder of Hugging Face's hub cache: HF_HUB_CACHE, else HUGGINGFACE_HUB_CACHE, else `hub` in
/// HF_HOME, which is by default `huggingface` in XDG_CACHE_HOME or ~/.cache. As in
/// `huggingface_hub`, "~" and variables in these values are expanded. The folder may not exist.
std::filesystem::path hub_cache();

/// Resolves the name in a program's flag. Returns `name` itself if it is an existing file or
/// folder, or if it is not a model's name on the hub ("org/name" or "name", optionally followed by
/// "@revision", default main). Otherwise returns the model's snapshot in the cache, or a file in
/// it. Nothing is downloaded. A name without "org/" that is not in the cache is returned as a path.
/// Throws Error if the cache lacks the model, with the command that would fetch it.
std::string hub_path(const std::string& name, HubItem item);

/// Throws Error for a snapshot in the cache whose weights are incomplete, with the name of the
/// first missing file. Does nothing for other folders.
void check_hub_weights(const std::filesystem::path& folder);

}  // namespace tessera
TESSERA_API_END
