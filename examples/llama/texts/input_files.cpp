#include "examples/llama/texts/input_files.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include "tessera/core/error.h"

namespace llama {
namespace {

/// Each file once, at its first place: a name and a pattern, or two patterns, may have one in
/// common.
std::vector<std::string> without_repeats(const std::vector<std::string>& files) {
  std::vector<std::string> once;
  std::set<std::filesystem::path> seen;
  for (const std::string& file : files) {
    std::error_code error;
    const std::filesystem::path place = std::filesystem::weakly_canonical(file, error);
    // Where that can't be told, reading the file says why.
    if (seen.insert(error ? std::filesystem::path(file) : place).second) {
      once.push_back(file);
    }
  }
  return once;
}

}  // namespace

std::vector<std::string> list_files(const std::string& flag,
                                    const std::vector<std::string>& patterns) {
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    // A name may have characters that mean something in a pattern.
    std::error_code error;
    if (std::filesystem::exists(pattern, error)) {
      files.push_back(pattern);
      continue;
    }
    glob_t found{};
    const int status = glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
    std::vector<std::string> matches(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    TESSERA_CHECK(status == 0 || status == GLOB_NOMATCH, flag, ": cannot list the files of '",
                  pattern, "'; check the folder's permissions");
    TESSERA_CHECK(!matches.empty(), flag, ": no file matches '", pattern, "'",
                  error ? " (" + error.message() + ")" : "",
                  "; name files that exist, in folders that may be read");
    std::ranges::sort(matches);
    files.insert(files.end(), matches.begin(), matches.end());
  }
  return without_repeats(files);
}

}  // namespace llama
