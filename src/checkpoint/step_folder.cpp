#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <exception>
#include <random>
#include <system_error>

#include "format.h"
#include "manifest.h"
#include "ranks.h"
#include "step_folder.h"
#include "tessera/checkpoint/detail/run_folder.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/world.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kMarker = "INCOMPLETE";
constexpr std::string_view kStepPrefix = "step-";
constexpr std::uint64_t kMaxMarkerBytes = 10'000;

/// Returns the step number in a name that step_folder_name() made; nullopt for other names.
std::optional<std::int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  std::int64_t step = 0;
  if (name.starts_with(kStepPrefix)) {
    std::from_chars(name.data() + kStepPrefix.size(), name.data() + name.size(), step);
  }
  return name == detail::step_folder_name(step) ? std::optional(step) : std::nullopt;
}

std::map<std::int64_t, fs::path, std::greater<>> steps_in(const fs::path& dir) {
  std::map<std::int64_t, fs::path, std::greater<>> steps;
  std::error_code error;
  fs::directory_iterator entries(dir, error);
  const bool missing =
      error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
  TESSERA_CHECK(!error || missing, "cannot read the folder '", dir.string(), "': ", error.message(),
                ": pass a folder that can be read");
  for (const auto& entry : entries) {
    if (const auto step = step_of(entry.path()); step && entry.is_directory(error)) {
      steps.emplace(*step, entry.path());
    }
  }
  return steps;
}

/// Returns the text of the marker file, which is the run_id; nullopt if there is no marker file.
std::optional<std::string> marker_of(const fs::path& folder) {
  if (!is_marked(folder)) {
    return std::nullopt;
  }
  return files::read_file(folder / kMarker, "the marker of a step", kMaxMarkerBytes,
                          files::Symlinks::kRefuse);
}

/// Whether the folder is empty, or has only a temporary marker file whose writer was killed.
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

void remove_under_marker(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() != kMarker) {
      files.push_back(entry.path());
    }
  }
  std::ranges::for_each(files, remove_file);
}

/// Throws Error if the step has a subfolder, because no save creates subfolders. Must be called
/// before the manifest is removed, so that the step stays complete.
void check_removable(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    TESSERA_CHECK(!fs::is_directory(entry.symlink_status()), "it has the folder '",
                  entry.path().filename().string(),
                  "', which no save creates: move the folder away, or remove the step yourself");
  }
}

/// Removes a saved step. The manifest is removed first, because a step without a manifest is
/// incomplete. The marker file is last, so that later saves recognize the remains.
void remove_step(const fs::path& folder) {
  remove_file(folder / kManifestFile);
  files::sync_folder(folder);
  remove_under_marker(folder);
  files::sync_folder(folder);
  remove_file(folder / kMarker);
  TESSERA_CHECK(rmdir(folder.c_str()) == 0, "cannot remove '", folder.string(),
                "': ", std::strerror(errno), ": remove it yourself");
}

void check_step(const Manifest& manifest, const fs::path& folder, std::int64_t step) {
  TESSERA_CHECK(manifest.step == step, "the manifest in '", folder.string(), "' is of step ",
                manifest.step, ": rename the folder to ", detail::step_folder_name(manifest.step));
}

/// Returns the manifest of a complete step. Returns nullopt for a missing or invalid manifest.
/// Throws ReadError for a manifest that cannot be read at the moment.
std::optional<Manifest> committed(const fs::path& folder, std::int64_t step) {
  if (lacks_manifest(folder)) {
    return std::nullopt;
  }
  try {
    Manifest manifest = read_manifest(folder);
    check_step(manifest, folder, step);
    return manifest;
  } catch (const tessera::detail::ReadError&) {
    if (lacks_manifest(folder)) {
      return std::nullopt;  // no manifest: another process removed the step
    }
    throw;
  } catch (const Error& problem) {
    TORCH_WARN("a step is skipped: ", problem.what());
    return std::nullopt;
  }
}

/// Returns the highest saved step below `before` with a valid manifest. Warns about invalid
/// manifests. Throws Error if a manifest cannot be read, because the manifest may be valid.
std::optional<std::int64_t> newest_step_in(const fs::path& dir,
                                           std::optional<std::int64_t> before = std::nullopt) {
  for (const auto& [step, folder] : steps_in(dir)) {
    if ((!before || step < *before) && committed(folder, step)) {
      return step;
    }
  }
  return std::nullopt;
}

/// Calls `look` on rank 0, and broadcasts the JSON that `look` returns to all ranks.
json of_first_rank(comm::World& world, const std::function<json()>& look) {
  std::string text;
  run_or_fail_on_all(world, [&] {
    if (world.rank() == 0) {
      text = look().dump();
    }
  });
  return json::parse(
      comm::broadcast_text(*all_ranks(world), c10::Device(world.options().device), 0, text));
}

template <class T>
std::optional<T> optional_of_first_rank(comm::World& world,
                                        const std::function<std::optional<T>()>& look) {
  const json found = of_first_rank(world, [&] {
    const std::optional<T> own = look();
    return own ? json(*own) : json();
  });
  return found.is_null() ? std::nullopt : std::optional(found.get<T>());
}

/// Returns the run_id of a saved step; nullopt if the step or a valid manifest is missing.
std::optional<std::string> run_of_whole_step(const fs::path& folder) {
  try {
    return lacks_manifest(folder) ? std::nullopt : std::optional(read_manifest(folder).run_id);
  } catch (const Error&) {
    return std::nullopt;
  }
}

void check_one_run(const fs::path& dir, const fs::path& step, const std::string& run_id) {
  for (const auto& [number, folder] : steps_in(dir)) {
    const std::optional<std::string> other = run_of_whole_step(folder);
    TESSERA_CHECK(!other || *other == run_id, "'", dir.string(),
                  "' has steps of two runs: ", step.filename().string(), " of run ", ascii(run_id),
                  ", ", folder.filename().string(), " of run ", ascii(other.value_or("")),
                  ": move the steps of one run to another folder");
  }
}

/// Returns the saved steps with numbers above `after`, highest first. A run that resumes from the
/// step `after` marks these later steps as unfinished.
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
                  "' has no manifest and is later than the newest complete step, ", after,
                  ": move this folder away to continue from step ", after);
    TESSERA_CHECK(!marker || *marker == run_id, "'", folder.string(),
                  "' is the unfinished save of another run, run ", ascii(marker.value_or("")),
                  ": remove the folder first");
  }
  return found;
}

}  // namespace

bool is_marked(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / kMarker, error);
}

bool lacks_manifest(const fs::path& folder) {
  std::error_code error;
  return fs::symlink_status(folder / kManifestFile, error).type() == fs::file_type::not_found;
}

std::string detail::step_folder_name(std::int64_t step) {
  return fmt::format("{}{:08}", kStepPrefix, step);
}

bool is_run_id(const std::string& text) {
  constexpr std::size_t kMostBytes = 200;
  return text.size() <= kMostBytes &&
         std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~'; });
}

StepFolder::StepFolder(const fs::path& dir, std::int64_t step, std::string run_id)
    : step_(step),
      dir_(files::absolute_path(dir)),
      path_(dir_ / detail::step_folder_name(step)),
      run_id_(std::move(run_id)) {}

/// Creates the marker file. If several runs start the same step at once, only one run succeeds.
void StepFolder::claim() const {
  files::create_folders(dir_);
  TESSERA_CHECK(mkdir(path_.c_str(), 0777) == 0 || errno == EEXIST, "cannot create the folder '",
                path_.string(), "': ", std::strerror(errno),
                ": pass a writable folder on a disk with free space");
  std::error_code error;
  // A symbolic link is rejected, because it can lead to the files of another program.
  TESSERA_CHECK(fs::is_directory(fs::symlink_status(path_, error)), "'", path_.string(),
                "' is not a folder, but the step must be saved there: move the file or link away");
  check_not_there();
  if (is_untouched(path_) && files::write_new_file(path_ / kMarker, run_id_)) {
    if (!lacks_manifest(path_)) {
      remove_file(path_ / kMarker);  // another run completed this step after check_not_there()
    }
    return check_not_there();
  }
  TESSERA_CHECK(marker_of(path_) == run_id_, "'", path_.string(),
                "' is the unfinished save of another run: remove the folder first");
  remove_under_marker(path_);
  files::sync_folder(path_);  // a killed save may not have synced the marker file
}

void StepFolder::check_not_there() const {
  TESSERA_CHECK(!fs::exists(path_ / kManifestFile), "'", path_.string(),
                "' exists already: save another step, or remove the folder first");
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
                "' is a symbolic link later than the step to continue from: remove the link");
  const std::string text = read_manifest_text(path_);
  if (!is_as_written(text)) {
    return;
  }
  const Manifest manifest = parse_manifest(text, path_ / kManifestFile);
  TESSERA_CHECK(manifest.run_id == run_id_, "'", path_.string(),
                "' is a damaged step of another run: move the folder away");
  check_step(manifest, path_, step_);
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
  } catch (const std::exception&) {  // errors are ignored: the next save removes the remains
  }
}

void StepFolder::clean_up_others(int keep) const {
  int kept = 1;  // the step that is being saved counts as retained
  for (const auto& [step, folder] : steps_in(dir_)) {
    std::error_code ignored;
    // A symbolic link is not removed, because its target can belong to another run.
    if (step == step_ || fs::is_symlink(folder, ignored)) {
      continue;
    }
    try {
      clean_up(folder, step, keep, kept);
    } catch (const std::exception& error) {
      TORCH_WARN("'", folder.string(), "' could not be cleaned up: ", error.what());
    }
  }
}

void StepFolder::clean_up(const fs::path& folder, std::int64_t step, int keep, int& kept) const {
  const bool marked = marker_of(folder) == run_id_;
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
    // The step is complete, but the save was killed before it could remove the marker file.
    remove_file(folder / kMarker);
  }
}

std::filesystem::path find_step(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::exists(path / kManifestFile, error) || has_torch_hf_shards(path)) {
    return path;
  }
  refuse_torch_checkpoint(path);
  const auto step = newest_step_in(path);
  TESSERA_CHECK(step, "there is no checkpoint in '", path.string(),
                "': pass a folder with a complete step, which has a ", kManifestFile);
  return path / detail::step_folder_name(*step);
}

std::string new_run_id(comm::World& world) {
  return of_first_rank(world, [] {
    std::random_device random;
    return fmt::format("{:08x}{:08x}", random(), random());
  });
}

std::string run_of_step(comm::World& world, const fs::path& dir, std::int64_t step) {
  return of_first_rank(world, [&] {
    const fs::path folder = dir / detail::step_folder_name(step);
    std::string run_id = manifest_in(find_step(folder)).run_id;
    check_one_run(dir, folder, run_id);
    return run_id;
  });
}

std::optional<std::string> detail::unfinished_run(comm::World& world, const fs::path& dir) {
  return optional_of_first_rank<std::string>(world, [&]() -> std::optional<std::string> {
    for (const auto& [step, folder] : steps_in(dir)) {
      const std::optional<std::string> marker = marker_of(folder);
      if (marker && is_run_id(*marker) && lacks_manifest(folder)) {
        return marker;
      }
    }
    return std::nullopt;
  });
}

std::optional<std::int64_t> newest_step(comm::World& world, const fs::path& dir,
                                        std::optional<std::int64_t> before) {
  return optional_of_first_rank<std::int64_t>(world, [&] { return newest_step_in(dir, before); });
}

std::optional<std::int64_t> detail::last_step(comm::World& world, const fs::path& dir) {
  return optional_of_first_rank<std::int64_t>(world, [&]() -> std::optional<std::int64_t> {
    for (const auto& [step, folder] : steps_in(dir)) {
      if (!lacks_manifest(folder) || !(is_marked(folder) || is_untouched(folder))) {
        return step;
      }
    }
    return std::nullopt;
  });
}

std::vector<std::int64_t> detail::steps_to_withdraw(comm::World& world, const fs::path& dir,
                                                    std::int64_t after, const std::string& run_id) {
  return of_first_rank(world, [&] { return steps_to_withdraw_in(dir, after, run_id); });
}

void detail::withdraw_step(const fs::path& dir, std::int64_t step, const std::string& run_id) {
  StepFolder(dir, step, run_id).withdraw();
}

}  // namespace tessera::checkpoint
