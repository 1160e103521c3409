// The folders of steps, on the rank that makes and removes them. A step exists if its manifest
// exists; until then its folder has a marker. No folder is renamed, and no file records the newest
// step: some network file systems can do neither atomically.

#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Whether a text may be a run_id: at most 200 printable ASCII characters.
bool is_run_id(const std::string& text);
/// A run_id in ASCII, for messages: files may have any text.
std::string quoted_run(const std::string& run_id);

/// The folder of a step that is being saved.
class StepFolder {
 public:
  /// A relative `dir` is below the working directory of now, also after a later chdir().
  StepFolder(const std::filesystem::path& dir, std::int64_t step, std::string run_id);

  const std::filesystem::path& path() const { return path_; }

  /// Makes the folder, with its marker. Remains of an unfinished save of the same run are removed.
  /// Throws Error if the step exists, or belongs to another run, also to one that began it at the
  /// same time.
  void claim() const;
  /// Writes the manifest: from then on the step exists, also after a crash.
  void commit(const std::string& manifest) const;
  /// Removes the marker of a complete step.
  void release() const;
  /// Removes the remains of this run's unfinished saves, and all steps of the run but this one and
  /// the highest others, `keep` in all (0: removes no step). A step that cannot be removed stays,
  /// with a warning the first time. Symbolic links stay.
  void clean_up_others(int keep) const;
  /// Removes the folder. Errors are ignored: the marker is removed last, so that the next save of
  /// the run finds the remains.
  void discard() const noexcept;

  /// Throws Error if the step has the manifest of another run or step, or one that can't be read. A
  /// damaged manifest passes: its run is unknown.
  void check_withdrawable() const;
  /// Turns a complete step of the same run into the remains of a save. Throws as
  /// check_withdrawable().
  void withdraw() const;

 private:
  /// Handles one other step. `kept`: the number of steps that stay so far.
  void clean_up(const std::filesystem::path& folder, std::int64_t step, int keep, int& kept) const;
  void check_not_there() const;

  std::int64_t step_;
  std::filesystem::path dir_;
  std::filesystem::path path_;
  std::string run_id_;
};

/// The number of a folder that step_folder_name() names; nullopt: it has another name.
std::optional<std::int64_t> step_of(const std::filesystem::path& folder);

/// Whether a folder has the marker of a save or a removal that has not ended.
bool is_marked(const std::filesystem::path& folder);

/// The text of that marker, the run_id; nullopt for none.
std::optional<std::string> marker_of(const std::filesystem::path& folder);

/// Whether a folder certainly has no manifest. False if that is unknown for the moment: such a step
/// may be complete.
bool lacks_manifest(const std::filesystem::path& folder);

/// The folders of steps, the highest step first.
std::map<std::int64_t, std::filesystem::path, std::greater<>> steps_in(
    const std::filesystem::path& dir);

/// The highest step, below `before`, with a valid manifest. A warning names those that are not
/// valid. Throws Error for a manifest that is there and cannot be read: it may be valid.
std::optional<std::int64_t> newest_step_in(const std::filesystem::path& dir,
                                           std::optional<std::int64_t> before = std::nullopt);

/// The highest step whose folder is not just the remains of a save.
std::optional<std::int64_t> last_step_in(const std::filesystem::path& dir);

/// The steps later than `after` that are in the way of a run which continues from there, the
/// highest first. Throws Error if one of them can't be withdrawn, and for remains of another run's
/// save.
std::vector<std::int64_t> steps_to_withdraw_in(const std::filesystem::path& dir, std::int64_t after,
                                               const std::string& run_id);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
