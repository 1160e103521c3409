#include "rank_logs.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "../run_folder.h"
#include "tessera/core/error.h"

namespace tessera::run {
namespace {

constexpr int kOlderFiles = 2;

FileDescriptor open_new(const std::string& path) {
  return FileDescriptor(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
}

void make_folder(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  TESSERA_CHECK(!error, "--log-dir ", path.string(), " cannot be made: ", error.message());
}

}  // namespace

RankLog::RankLog(const std::string& path, std::int64_t most)
    : path_(path), most_(most), file_(open_new(path)), sink_(file_.get()) {
  if (!file_) {
    fail_errno("cannot write " + path);
  }
}

void RankLog::add(const std::string& line) {
  const auto size = static_cast<std::int64_t>(line.size()) + 1;
  if (most_ > 0 && bytes_ > 0 && bytes_ + size > most_) {
    begin_next_file();
  }
  bytes_ += size;
  sink_.add(line + "\n");
}

// What cannot be renamed or opened is no reason to lose lines: the file grows on, and it is tried
// again when as much has come once more.
void RankLog::begin_next_file() {
  bytes_ = 0;
  sink_.flush();
  if (sink_.pending()) {
    return;
  }
  for (int older = kOlderFiles; older > 0; --older) {
    const std::string from = older == 1 ? path_ : path_ + "." + std::to_string(older - 1);
    std::rename(from.c_str(), (path_ + "." + std::to_string(older)).c_str());
  }
  if (const FileDescriptor next = open_new(path_)) {
    dup3(next.get(), file_.get(), O_CLOEXEC);  // the sink goes on with its number
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
                                          ? folder_for_temporary("--log-dir")
                                          : std::filesystem::absolute(options_.folder);
  make_folder(above);
  std::string name = options_.folder.empty()  ? "tessera-logs"
                     : options.job_id.empty() ? "none"
                                              : options.job_id;
  std::ranges::replace(name, '/', '_');  // it is one folder
  path_ = (above / (name + "_XXXXXX")).string();
  TESSERA_CHECK(mkdtemp(path_.data()) != nullptr, "cannot make a folder ", path_, ": ",
                std::strerror(errno), ": give --log-dir one that can be written");
}

std::optional<RankLog> LogFolder::out(int start, int local_rank) const {
  const bool written = options_.tee.has_out(local_rank) || options_.redirects.has_out(local_rank);
  return written ? std::optional<RankLog>(std::in_place, file(start, local_rank, "stdout.log"),
                                          options_.file_bytes)
                 : std::nullopt;
}

std::optional<RankLog> LogFolder::err(int start, int local_rank) const {
  const bool written = options_.tee.has_err(local_rank) || options_.redirects.has_err(local_rank);
  return written ? std::optional<RankLog>(std::in_place, file(start, local_rank, "stderr.log"),
                                          options_.file_bytes)
                 : std::nullopt;
}

std::string LogFolder::file(int start, int local_rank, const char* name) const {
  const auto folder = std::filesystem::path(path_) / ("attempt_" + std::to_string(start)) /
                      std::to_string(local_rank);
  make_folder(folder);
  return (folder / name).string();
}

}  // namespace tessera::run
