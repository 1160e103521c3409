// Reads Hugging Face's hub cache: models--ORG--NAME/refs/REVISION contains a commit, and
// models--ORG--NAME/snapshots/COMMIT has links to the files in models--ORG--NAME/blobs.

#include "tessera/core/hub_cache.h"

#include <pwd.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <regex>
#include <set>
#include <system_error>

#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMostIndexBytes = 100'000'000;
constexpr std::uint64_t kMostRefBytes = 1000;
constexpr const char* kFolderPrefix = "models--";

/// The name of a model on Hugging Face's hub.
struct HubName {
  std::string model;
  std::string revision;  ///< branch, tag or commit; "" means main

  std::string folder() const {
    return kFolderPrefix + std::regex_replace(model, std::regex("/"), "--");
  }
  std::string fetch() const {
    return "fetch it with: hf download " + model +
           (revision.empty() ? "" : " --revision " + revision);
  }
};

std::optional<std::string> variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value != nullptr && *value != '\0' ? std::optional<std::string>(value) : std::nullopt;
}

std::string home() {
  if (const auto set = variable("HOME")) {
    return *set;
  }
  const passwd* user = getpwuid(getuid());
  return user != nullptr ? user->pw_dir : "/";
}

/// Expands "~" and environment variables, like Python's os.path.expanduser() and expandvars(). An
/// unset variable is not replaced.
fs::path expanded(std::string text) {
  if (text == "~" || text.starts_with("~/")) {
    text = home() + text.substr(1);
  }
  static const std::regex kVariable(R"(\$(\w+|\{\w+\}))");
  std::string result;
  auto rest = text.cbegin();
  for (std::sregex_iterator found(text.begin(), text.end(), kVariable), none; found != none;
       ++found) {
    const std::string name = std::regex_replace(found->str(1), std::regex("[{}]"), "");
    result.append(rest, (*found)[0].first);
    result += variable(name).value_or(found->str());
    rest = (*found)[0].second;
  }
  return result.append(rest, text.cend());
}

/// Parses the name of a model on the hub; nullopt for a text that can only be a path.
std::optional<HubName> parse_name(const std::string& text) {
  static const std::regex kForm(R"(((?:\w[\w.-]*/)?\w[\w.-]{0,95})(?:@([\w.-]+(?:/[\w.-]+)*))?)");
  static const std::regex kFile(R"(.*(--|\.\.|\.git$|\.json$|\.model$|[.-]$|[.-]/).*)");
  std::smatch parts;
  if (!std::regex_match(text, parts, kForm) || std::regex_match(parts.str(1), kFile) ||
      parts.str(2).find("..") != std::string::npos) {
    return std::nullopt;
  }
  return HubName{parts.str(1), parts.str(2)};
}

/// Returns the commit of a branch or tag; returns `revision` itself if it is neither.
std::string commit_of(const fs::path& model, const std::string& revision) {
  const fs::path ref = model / "refs" / (revision.empty() ? "main" : revision);
  std::error_code error;
  return fs::is_regular_file(ref, error) ? files::read_file(ref, "a revision", kMostRefBytes)
                                         : ref.filename().string();
}

/// Whether the folder contains the file. A link to a missing file counts as missing.
bool has(const fs::path& folder, const char* file) {
  std::error_code error;
  return fs::exists(folder / file, error);
}

void check_has(const fs::path& snapshot, const HubName& name,
               const std::vector<std::string>& alternatives) {
  for (const std::string& file : alternatives) {
    if (has(snapshot, file.c_str())) {
      return;
    }
  }
  fail("the model ", name.model, " in the hub's cache has no ", alternatives.front(), " ('",
       snapshot.string(), "'); ", name.fetch());
}

/// Returns the model and commit of a snapshot folder; nullopt for any other folder.
std::optional<HubName> name_of(const fs::path& snapshot) {
  const std::string model = snapshot.parent_path().parent_path().filename().string();
  if (snapshot.parent_path().filename() != "snapshots" || !model.starts_with(kFolderPrefix)) {
    return std::nullopt;
  }
  const std::string written = model.substr(std::string(kFolderPrefix).size());
  return HubName{std::regex_replace(written, std::regex("--"), "/"), snapshot.filename().string()};
}

std::set<std::string> shards_of(const fs::path& index) {
  const auto root =
      detail::parse_strict_json(files::read_file(index, "an index of weights", kMostIndexBytes));
  std::set<std::string> shards;
  for (const auto& shard : root.value("weight_map", nlohmann::json::object())) {
    if (shard.is_string()) {
      shards.insert(shard.get<std::string>());
    }
  }
  return shards;
}

/// Returns the folder of a model's snapshot; nullopt if the hub cache has no such model.
std::optional<fs::path> find_snapshot(const HubName& name) {
  const fs::path model = hub_cache() / name.folder();
  std::error_code error;
  if (!fs::is_directory(model, error)) {
    return std::nullopt;
  }
  fs::path snapshot = model / "snapshots" / commit_of(model, name.revision);
  TESSERA_CHECK(fs::is_directory(snapshot, error), "the model ", name.model,
                " in the hub's cache has no revision ",
                name.revision.empty() ? "main" : name.revision, " ('", model.string(), "'); ",
                name.fetch());
  return snapshot;
}

}  // namespace

std::filesystem::path hub_cache() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (const auto set = variable(name)) {
      return expanded(*set);
    }
  }
  if (const auto set = variable("HF_HOME")) {
    return expanded(*set) / "hub";
  }
  return expanded(variable("XDG_CACHE_HOME").value_or("~/.cache")) / "huggingface" / "hub";
}

std::string hub_path(const std::string& name, HubItem item) {
  std::error_code error;
  const auto model = parse_name(name);
  if (name.empty() || !model || fs::exists(name, error)) {
    return name;
  }
  const auto snapshot = find_snapshot(*model);
  if (!snapshot) {
    TESSERA_CHECK(model->model.find('/') == std::string::npos, "'", name,
                  "' is neither here nor in the hub's cache '", hub_cache().string(),
                  "'; correct the path, or ", model->fetch());
    return name;
  }
  if (item == HubItem::kTokenizer) {
    check_has(*snapshot, *model, {"tokenizer.json", "tokenizer.model"});
    return snapshot->string();
  }
  check_has(*snapshot, *model, {"config.json"});
  return item == HubItem::kConfig ? (*snapshot / "config.json").string() : snapshot->string();
}

void check_hub_weights(const std::filesystem::path& folder) {
  const auto name = name_of(folder);
  if (!name || has(folder, "model.safetensors")) {
    return;
  }
  const char* index = "model.safetensors.index.json";
  check_has(folder, *name, {index});
  for (const std::string& shard : shards_of(folder / index)) {
    check_has(folder, *name, {shard});
  }
}

}  // namespace tessera
