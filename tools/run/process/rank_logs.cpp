#include "rank_logs.h"

#include <fcntl.h>
#include <stdlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera::run {
namespace {

void make_folder(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  TESSERA_CHECK(!error, "--log-dir ", path.string(), " cannot be made: ", error.message());
}

}  // namespace

RankLog::RankLog(const std::string& path)
    : path_(path),
      file_(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)),
      sink_(file_.get()) {
  if (!file_) {
    fail_errno("cannot write " + path);
  }
}

std::string RankLog::loss() const {
  return sink_.error() == 0 ? ""
                            : path_ + " lacks lines of its rank: " + std::strerror(sink_.error());
}

LogFolder::LogFolder(const Options& options) : options_(options.logs) {
  if (!options_.tee.has_any() && !options_.redirects.has_any()) {
    return;
  }
  const std::filesystem::path above = options_.folder.empty()
                                          ? std::filesystem::temp_directory_path()
                                          : std::filesystem::absolute(options_.folder);
  make_folder(above);
  const std::string name = options_.folder.empty()  ? "tessera-logs"
                           : options.job_id.empty() ? "none"
                                                    : options.job_id;
  path_ = (above / (name + "_XXXXXX")).string();
  TESSERA_CHECK(mkdtemp(path_.data()) != nullptr, "cannot make a folder ", path_, ": ",
                std::strerror(errno), ": give --log-dir one that can be written");
}

std::optional<RankLog> LogFolder::out(int start, int local_rank) const {
  const bool written = options_.tee.has_out(local_rank) || options_.redirects.has_out(local_rank);
  return written ? std::optional<RankLog>(file(start, local_rank, "stdout.log")) : std::nullopt;
}

std::optional<RankLog> LogFolder::err(int start, int local_rank) const {
  const bool written = options_.tee.has_err(local_rank) || options_.redirects.has_err(local_rank);
  return written ? std::optional<RankLog>(file(start, local_rank, "stderr.log")) : std::nullopt;
}

std::string LogFolder::file(int start, int local_rank, const char* name) const {
  const auto folder = std::filesystem::path(path_) / ("attempt_" + std::to_string(start)) /
                      std::to_string(local_rank);
  make_folder(folder);
  return (folder / name).string();
}

}  // namespace tessera::run
