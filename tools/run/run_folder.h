// Where the ranks of a job write down what they do, and how long that is kept.

#pragma once

#include <filesystem>
#include <string>

namespace tessera::run {

/// Where temporary files go. Throws Error, with the option that makes it unneeded, if that is no
/// folder.
std::filesystem::path folder_for_temporary(const char* option);

/// The folder of the ranks' flight records. A given one is made if needed and stays; else a
/// temporary one is made, which goes with this object unless keep() was called.
class RunFolder {
 public:
  /// `given`: "" for a temporary one. One that has records already, as of the job before a restart,
  /// keeps them: those of this job go to the first free one of its folders run-2, run-3, ...;
  /// `shared`: not so, since other launchers of the job write there. Throws Error if the folder
  /// cannot be made.
  RunFolder(const std::string& given, bool shared);
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  ~RunFolder();

  const std::string& path() const { return path_; }
  /// "": it stays.
  std::string temporary_path() const { return temporary_ ? path_ : ""; }
  /// Whether there is anything that `--explain` can read.
  bool has_records() const;
  /// Whether a watchdog has reported a hang.
  bool has_reports() const;
  void keep() { temporary_ = false; }

 private:
  void make();
  /// Files `world-W.rank-R` with this extension.
  bool has_files(const std::string& extension) const;

  std::string path_;
  bool temporary_;
};

}  // namespace tessera::run
