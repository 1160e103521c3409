#include "examples/llama/named_files.h"

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

}  // namespace

void check_files_differ(const std::vector<NamedFile>& files) {
  std::map<std::filesystem::path, const NamedFile*> known;
  for (const NamedFile& file : files) {
    if (file.path.empty()) {
      continue;
    }
    const auto [other, is_new] = known.try_emplace(place_of(file.path), &file);
    TESSERA_CHECK(is_new || (file.is_read && other->second->is_read), other->second->what, " and ",
                  file.what, " are both ", file.path, "; give each a place of its own");
  }
}

}  // namespace llama
