// Creates and removes the folders of saved steps, on one rank. A step exists if its manifest
// exists. No folder is renamed, because renames on some network file systems are not atomic.

#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Whether a text is a valid run_id: at most 200 printable ASCII characters.
bool is_run_id(const std::string& text);

/// The folder of a checkpoint step that is being saved.
class StepFolder {
 public:
  /// `dir`: the folder of the run. A relative `dir` is resolved in the constructor, so a later
  /// chdir() has no effect.
  StepFolder(const std::filesystem::path& dir, std::int64_t step, std::string run_id);

  const std::filesystem::path& path() const { return path_; }

  /// Creates the step's folder and its marker file. First removes the remains of an unfinished save
  /// of the same run. Throws Error if the step exists or belongs to another run.
  void claim() const;
  /// Writes the manifest. From this call on the step exists, even after a crash.
  void commit(const std::string& manifest) const;
  /// Removes the marker file of a complete step.
  void release() const;
  /// Removes this run's unfinished saves and old steps. Keeps the saved step and the highest other
  /// steps, `keep` steps in total (0: all steps). Warns about a step that cannot be removed.
  void clean_up_others(int keep) const;
  /// Removes the folder of the step and ignores errors. The marker file is removed last, so that
  /// the next save of the run finds any remains.
  void discard() const noexcept;

  /// Throws Error if the step has the manifest of another run or step, or an unreadable manifest.
  /// Accepts a damaged manifest.
  void check_withdrawable() const;
  /// Removes the manifest of a step of this run, so that the folder counts as an unfinished save.
  /// Throws the errors of check_withdrawable().
  void withdraw() const;

 private:
  /// Removes the step in `folder` if this run wrote the step, and the step is unfinished or not
  /// among the newest `keep`. `kept`: counts this run's complete steps.
  void clean_up(const std::filesystem::path& folder, std::int64_t step, int keep, int& kept) const;
  void check_not_there() const;

  std::int64_t step_;
  std::filesystem::path dir_;
  std::filesystem::path path_;
  std::string run_id_;
};

/// Whether a step folder has a marker file, which an unfinished save or removal leaves.
bool is_marked(const std::filesystem::path& folder);

/// Whether a step folder certainly has no manifest. Returns false if the folder cannot be read at
/// the moment, because the step may be complete.
bool lacks_manifest(const std::filesystem::path& folder);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
