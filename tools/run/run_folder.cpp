#include "run_folder.h"

#include <stdlib.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera::run {

std::filesystem::path folder_for_temporary(const char* option) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::temp_directory_path(error);
  std::string asked = "/tmp";
  for (const char* name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}) {  // as the library looks
    if (const char* value = std::getenv(name)) {
      asked = std::string(name) + "=" + value;
      break;
    }
  }
  TESSERA_CHECK(!error, asked, " is no folder: correct it or give ", option);
  return path;
}

RunFolder::RunFolder(const std::string& given, bool shared)
    : path_(given), temporary_(given.empty()) {
  if (temporary_) {
    path_ = (folder_for_temporary("--run-dir") / "tessera-run-XXXXXX").string();
    TESSERA_CHECK(mkdtemp(path_.data()) != nullptr, "cannot make a folder ", path_, ": ",
                  std::strerror(errno), ": give --run-dir one that can be written");
    return;
  }
  path_ = std::filesystem::absolute(path_).string();  // the ranks may change their folder
  const std::string first = path_;
  make();
  for (int run = 2; !shared && (has_records() || has_reports()); ++run) {
    path_ = first + "/run-" + std::to_string(run);
    make();
  }
}

void RunFolder::make() {
  std::error_code error;
  std::filesystem::create_directories(path_, error);
  TESSERA_CHECK(!error, "--run-dir ", path_, " cannot be made: ", error.message());
}

RunFolder::~RunFolder() {
  if (temporary_) {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
}

bool RunFolder::has_records() const {
  return has_files(".flight");
}

bool RunFolder::has_reports() const {
  return has_files(".txt");
}

bool RunFolder::has_files(const std::string& extension) const {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(path_, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("world-") && name.find(".rank-") != std::string::npos &&
        name.ends_with(extension)) {
      return true;
    }
  }
  return false;
}

}  // namespace tessera::run
