#pragma once

#include <filesystem>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The kind of thing that a name refers to.
enum class HubItem {
  kModel,      ///< the folder of a model, with its config.json
  kConfig,     ///< its config.json
  kTokenizer,  ///< the folder of a model, with its tokenizer.json or tokenizer.model
};

/// The cache of Hugging Face's hub: HF_HUB_CACHE, else HUGGINGFACE_HUB_CACHE, else hub in HF_HOME,
/// which is huggingface in XDG_CACHE_HOME or ~/.cache. As in `huggingface_hub`, "~" and variables
/// in these are replaced. It may not exist.
std::filesystem::path hub_cache();

/// Resolves the name in a program's flag: `name` itself if there is such a file or folder, or if it
/// is not a model's name on the hub ("org/name" or "name", with "@revision" after it for another
/// than main); else that model's snapshot in the cache, or a file of it. Nothing is downloaded, and
/// a name without "org/" that is not in the cache is returned as a path. Throws Error if the cache
/// lacks the model, with the command that would fetch it.
std::string hub_path(const std::string& name, HubItem item);

/// Throws Error for a snapshot of the cache whose weights are not all there, with the name of the
/// first file that it lacks. Other folders are not looked at.
void check_hub_weights(const std::filesystem::path& folder);

}  // namespace tessera
TESSERA_API_END
