#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <system_error>

#include "manifest.h"
#include "step_folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/detail/atomic_file.h"
#include "tessera/core/detail/read_error.h"
#include "tessera/core/input_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMarker = "INCOMPLETE";
constexpr std::string_view kStepPrefix = "step-";
constexpr std::uint64_t kMaxMarkerBytes = 10'000;

/// Whether a folder has the marker of an unfinished save or removal by this run.
bool is_marked_by(const fs::path& folder, const std::string& run_id) {
  return marker_of(folder) == run_id;
}

/// Whether the folder is empty, or has only the temporary file of a marker whose writer was killed.
bool is_untouched(const fs::path& folder) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  return !error && std::ranges::all_of(entries, [](const fs::directory_entry& entry) {
    return entry.path().filename().string().starts_with(std::string(".") + kMarker);
  });
}

void remove_file(const fs::path& path) {
  TESSERA_CHECK(unlink(path.c_str()) == 0 || errno == ENOENT, "cannot remove '", path.string(),
                "': ", std::strerror(errno), ": remove it yourself");
}

/// Removes all files of a folder except the marker.
void remove_under_marker(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() != kMarker) {
      files.push_back(entry.path());
    }
  }
  std::ranges::for_each(files, remove_file);
}

/// Throws Error if the step cannot be removed. To be called before the manifest is removed, so that
/// a step that cannot be removed stays complete. Saves create no subfolders, so a step with a
/// subfolder is not removed.
void check_removable(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    TESSERA_CHECK(!fs::is_directory(entry.symlink_status()), "it has the folder '",
                  entry.path().filename().string(),
                  "', which no save makes: move that away, or remove the step yourself");
  }
}

/// Whether this process has not printed `warning` yet. Every save finds the same folder again, so a
/// warning would be repeated.
bool is_new(const std::string& warning) {
  static std::mutex mutex;
  static std::set<std::string> warnings;
  const std::lock_guard lock(mutex);
  return warnings.insert(warning).second;
}

/// Removes a step: the manifest first, so that the step no longer exists, and the marker last, so
/// that the run's next save finds the remaining files if this removal is interrupted.
void remove_step(const fs::path& folder) {
  remove_file(folder / kManifestFile);
  files::sync_folder(folder);
  remove_under_marker(folder);
  files::sync_folder(folder);
  remove_file(folder / kMarker);
  TESSERA_CHECK(rmdir(folder.c_str()) == 0, "cannot remove '", folder.string(),
                "': ", std::strerror(errno), ": remove it yourself");
}

/// Returns the manifest of a complete step; nullopt if there is no manifest, or if the manifest is
/// invalid, with a warning. Throws ReadError for a manifest that cannot be read at the moment,
/// because it may be valid.
std::optional<Manifest> committed(const fs::path& folder, std::int64_t step) {
  if (lacks_manifest(folder)) {
    return std::nullopt;
  }
  try {
    Manifest manifest = read_manifest(folder);
    TESSERA_CHECK(manifest.step == step, "the manifest in '", folder.string(), "' is of step ",
                  manifest.step, ": give the folder its name back");
    return manifest;
  } catch (const detail::ReadError&) {
    if (lacks_manifest(folder)) {
      return std::nullopt;  // the step was removed in the meantime
    }
    throw;
  } catch (const Error& problem) {
    TORCH_WARN("a step is passed over: ", problem.what());
    return std::nullopt;
  }
}

}  // namespace

std::optional<std::int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  std::int64_t step = 0;
  if (name.starts_with(kStepPrefix)) {
    std::from_chars(name.data() + kStepPrefix.size(), name.data() + name.size(), step);
  }
  return name == step_folder_name(step) ? std::optional(step) : std::nullopt;
}

std::string step_folder_name(std::int64_t step) {
  return fmt::format("{}{:08}", kStepPrefix, step);
}

bool is_run_id(const std::string& text) {
  constexpr std::size_t kMostBytes = 200;
  return text.size() <= kMostBytes &&
         std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~'; });
}

std::string quoted_run(const std::string& run_id) {
  return "run " + nlohmann::json(run_id).dump(-1, ' ', /*ensure_ascii=*/true,
                                              nlohmann::json::error_handler_t::replace);
}

std::map<std::int64_t, fs::path, std::greater<>> steps_in(const fs::path& dir) {
  std::map<std::int64_t, fs::path, std::greater<>> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    if (const auto step = step_of(entry.path()); step && entry.is_directory(error)) {
      steps.emplace(*step, entry.path());
    }
  }
  return steps;
}

bool is_marked(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / kMarker, error);
}

std::optional<std::string> marker_of(const fs::path& folder) {
  if (!is_marked(folder)) {
    return std::nullopt;
  }
  return files::read_file(folder / kMarker, "the marker of a step", kMaxMarkerBytes,
                          files::Symlinks::kRefuse);
}

bool lacks_manifest(const fs::path& folder) {
  std::error_code error;
  return fs::symlink_status(folder / kManifestFile, error).type() == fs::file_type::not_found;
}

StepFolder::StepFolder(const fs::path& dir, std::int64_t step, std::string run_id)
    : step_(step),
      dir_(files::absolute_path(dir)),
      path_(dir_ / step_folder_name(step)),
      run_id_(std::move(run_id)) {}

/// Creates the marker, which decides between runs that start the same step at the same time.
void StepFolder::claim() const {
  files::create_folders(dir_);
  TESSERA_CHECK(mkdir(path_.c_str(), 0777) == 0 || errno == EEXIST, "cannot make the folder '",
                path_.string(), "': ", std::strerror(errno),
                ": name a folder that may be written and has room");
  std::error_code error;
  // A link is rejected, because it may lead to the files of another program.
  TESSERA_CHECK(fs::is_directory(fs::symlink_status(path_, error)), "'", path_.string(),
                "' is where the step goes, and is not a folder: move it away");
  check_not_there();
  if (is_untouched(path_) && files::write_new_file(path_ / kMarker, run_id_)) {
    if (!lacks_manifest(path_)) {
      remove_file(path_ / kMarker);  // another run has completed the step in the meantime
    }
    return check_not_there();
  }
  TESSERA_CHECK(is_marked_by(path_, run_id_), "'", path_.string(),
                "' is the unfinished save of another run: remove it first");
  remove_under_marker(path_);
  files::sync_folder(path_);  // also makes the marker that a killed save has left durable
}

void StepFolder::check_not_there() const {
  TESSERA_CHECK(!fs::exists(path_ / kManifestFile), "'", path_.string(),
                "' exists already: save another step, or remove it first");
}

void StepFolder::commit(const std::string& manifest) const {
  files::sync_folder(dir_);
  files::write_file(path_ / kManifestFile, manifest);
}

void StepFolder::release() const {
  remove_file(path_ / kMarker);
}

void StepFolder::check_withdrawable() const {
  std::error_code ignored;
  TESSERA_CHECK(!fs::is_symlink(path_, ignored), "'", path_.string(),
                "' is later than the step to continue from, and a symbolic link: remove the link");
  const std::string text = read_manifest_text(path_);
  if (!is_as_written(text)) {
    return;
  }
  const Manifest manifest = parse_manifest(text, path_ / kManifestFile);
  TESSERA_CHECK(manifest.run_id == run_id_, "'", path_.string(),
                "' is damaged, but of another run: move it away");
  TESSERA_CHECK(manifest.step == step_, "the manifest in '", path_.string(), "' is of step ",
                manifest.step, ": give the folder its name back");
}

void StepFolder::withdraw() const {
  check_withdrawable();
  files::write_file(path_ / kMarker, run_id_);
  remove_file(path_ / kManifestFile);
  files::sync_folder(path_);
}

void StepFolder::discard() const noexcept {
  try {
    remove_step(path_);
  } catch (const std::exception&) {  // errors are ignored, as step_folder.h documents
  }
}

void StepFolder::clean_up_others(int keep) const {
  int kept = 1;  // counts the step being saved, even if there are higher steps
  for (const auto& [step, folder] : steps_in(dir_)) {
    std::error_code ignored;
    // A linked folder is not removed, because its target may belong to another run.
    if (step == step_ || fs::is_symlink(folder, ignored)) {
      continue;
    }
    try {
      clean_up(folder, step, keep, kept);
    } catch (const std::exception& error) {
      const std::string warning =
          fmt::format("'{}' could not be cleaned up: {}", folder.string(), error.what());
      if (is_new(warning)) {
        TORCH_WARN(warning);
      }
    }
  }
}

void StepFolder::clean_up(const fs::path& folder, std::int64_t step, int keep, int& kept) const {
  const bool marked = is_marked_by(folder, run_id_);
  if (keep == 0 && !marked) {
    return;
  }
  const auto manifest = committed(folder, step);
  if (!manifest) {
    if (marked && lacks_manifest(folder)) {
      check_removable(folder);
      remove_step(folder);
    }
  } else if (keep > 0 && manifest->run_id == run_id_ && ++kept > keep) {
    check_removable(folder);
    files::write_file(folder / kMarker, run_id_);
    remove_step(folder);
  } else if (marked) {
    // A save that was killed after its commit has left the marker.
    remove_file(folder / kMarker);
  }
}

std::optional<std::int64_t> newest_step_in(const fs::path& dir,
                                           std::optional<std::int64_t> before) {
  for (const auto& [step, folder] : steps_in(dir)) {
    if ((!before || step < *before) && committed(folder, step)) {
      return step;
    }
  }
  return std::nullopt;
}

std::optional<std::int64_t> last_step_in(const fs::path& dir) {
  for (const auto& [step, folder] : steps_in(dir)) {
    if (!lacks_manifest(folder) || !(is_marked(folder) || is_untouched(folder))) {
      return step;
    }
  }
  return std::nullopt;
}

std::vector<std::int64_t> steps_to_withdraw_in(const fs::path& dir, std::int64_t after,
                                               const std::string& run_id) {
  std::vector<std::int64_t> found;
  for (const auto& [step, folder] : steps_in(dir)) {
    if (step <= after) {
      break;
    }
    if (!lacks_manifest(folder)) {
      StepFolder(dir, step, run_id).check_withdrawable();
      found.push_back(step);
      continue;
    }
    const std::optional<std::string> marker = marker_of(folder);
    TESSERA_CHECK(marker || is_untouched(folder), "'", folder.string(),
                  "' has no manifest, and is later than the newest whole step, ", after,
                  ": move it away to continue from there");
    TESSERA_CHECK(!marker || *marker == run_id, "'", folder.string(),
                  "' is the unfinished save of another run, ", quoted_run(marker.value_or("")),
                  ": remove it first");
  }
  return found;
}

std::filesystem::path find_step(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::exists(path / kManifestFile, error) || has_torch_hf_shards(path)) {
    return path;
  }
  refuse_torch_checkpoint(path);
  const auto step = newest_step_in(path);
  TESSERA_CHECK(step, "there is no checkpoint in '", path.string(),
                "': give a folder with a step that was saved whole, which has a ", kManifestFile);
  return path / step_folder_name(*step);
}

}  // namespace tessera::checkpoint
