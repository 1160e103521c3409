#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "faults/changes.h"

namespace tessera::testing {

/// What a power cut loses of changes without a sync.
enum class Lost {
  kAll,   ///< the names of files, and what is in them
  kBytes  ///< what is in files: the names have reached the disk before
};

/// Simulates a disk that keeps only synced data: fsync() of a file keeps its bytes, fsync() of a
/// folder keeps its names.
class Disk {
 public:
  /// All that is in `folder` now is durable.
  explicit Disk(const std::filesystem::path& folder);

  void apply(const Change& change);
  /// Writes the state of the folder after a power cut to `out`.
  void write_after_power_cut(const std::filesystem::path& out, Lost lost) const;

 private:
  /// A file, or a folder: 0.
  using FileId = std::uint64_t;
  using Names = std::map<std::string, FileId>;
  struct View {
    std::map<std::string, Names> folders;  ///< by path
    std::map<FileId, std::string> files;
  };

  void add_folder(const std::filesystem::path& folder);
  Names& names_beside(const std::string& path);
  void sync(const Change& change);
  void write_folder(const std::string& folder, const std::filesystem::path& out, Lost lost) const;

  std::string root_;
  View now_, durable_;
  std::map<std::uint64_t, FileId> id_of_;  ///< by inode, which the system gives again
  FileId last_ = 0;
};

}  // namespace tessera::testing
