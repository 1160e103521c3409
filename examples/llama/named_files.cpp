#include "examples/llama/named_files.h"

#include <fnmatch.h>
#include <glob.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <system_error>

#include "tessera/core/error.h"

namespace llama {
namespace {

/// However it is written. A folder may end in a slash.
std::filesystem::path place_of(const std::string& file) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(file, error);
  const std::filesystem::path known = std::filesystem::weakly_canonical(path, error);
  const std::filesystem::path place = error ? path.lexically_normal() : known;
  return place.has_filename() ? place : place.parent_path();
}

/// Others may be in the folder of a model, or of a step, without being of it.
bool is_of_model(const std::string& name) {
  constexpr std::array kNames{"*.safetensors",     "*.safetensors.index.json",
                              "config.json",       "generation_config.json",
                              "tokenizer*",        "special_tokens_map.json",
                              "added_tokens.json", "vocab.json",
                              "merges.txt",        "*.jinja",
                              "manifest.json"};
  return std::ranges::any_of(
      kNames, [&](const char* pattern) { return fnmatch(pattern, name.c_str(), 0) == 0; });
}

std::vector<std::string> matches_of(const std::string& pattern) {
  glob_t found{};
  glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> matches(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return matches;
}

/// All that is read under one name. A missing file is an error where it is opened.
std::vector<std::string> places_read(const std::string& path) {
  std::error_code error;
  std::vector<std::string> places{path};
  if (!std::filesystem::exists(path, error)) {
    const std::vector<std::string> matches = matches_of(path);
    places.insert(places.end(), matches.begin(), matches.end());
  } else if (std::filesystem::is_directory(path, error)) {
    for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
      if (is_of_model(entry.path().filename().string())) {
        places.push_back(entry.path().string());
      }
    }
  }
  return places;
}

}  // namespace

void check_files_differ(const std::vector<NamedFile>& files) {
  std::map<std::filesystem::path, const NamedFile*> known;
  for (const NamedFile& file : files) {
    if (file.path.empty()) {
      continue;
    }
    for (const std::string& path :
         file.is_read ? places_read(file.path) : std::vector<std::string>{file.path}) {
      const auto [other, is_new] = known.try_emplace(place_of(path), &file);
      TESSERA_CHECK(is_new || (file.is_read && other->second->is_read), other->second->what,
                    " and ", file.what, " are both ", path, "; give each its own path");
    }
  }
}

}  // namespace llama
