// Steps to and from an object store. The manifest is put last, and got last: what has none is no
// step, there or here.

#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <span>
#include <system_error>
#include <thread>

#include "all_ranks.h"
#include "checksum/granules.h"
#include "step/manifest.h"
#include "step/step_folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/find_step.h"
#include "tessera/checkpoint/object_store.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/comm/world.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

void with_retries(const TransferOptions& options, const std::function<void()>& work) {
  std::chrono::milliseconds pause = options.pause;
  for (int left = options.retries;; --left, pause *= 2) {
    try {
      work();
      return;
    } catch (const Error&) {
      if (left <= 0) {
        throw;
      }
    }
    std::this_thread::sleep_for(pause);
  }
}

/// What keys below a prefix begin with. Slashes at its end are not doubled.
std::string beginning_below(std::string prefix) {
  prefix.erase(prefix.find_last_not_of('/') + 1);
  return prefix.empty() ? "" : prefix + "/";
}

std::string key_of_step(const std::string& prefix, std::int64_t step) {
  return beginning_below(prefix) + step_folder_name(step) + "/";
}

/// nullopt: the store has no such object.
std::optional<std::uint64_t> size_of(ObjectStore& store, const std::string& key,
                                     const TransferOptions& options) {
  std::vector<ObjectStore::Object> found;
  with_retries(options, [&] { found = store.list(key); });
  const auto object = std::ranges::find(found, key, &ObjectStore::Object::key);
  return object == found.end() ? std::nullopt : std::optional(object->bytes);
}

/// Moves an object until its whole size has come: one that was cut short may have been no failure.
void move_whole(const std::string& key, std::uint64_t bytes, const TransferOptions& options,
                const std::function<void()>& move,
                const std::function<std::optional<std::uint64_t>()>& size_there) {
  for (int left = options.retries;; --left) {
    with_retries(options, move);
    const std::optional<std::uint64_t> size = size_there();
    if (size == bytes) {
      return;
    }
    TESSERA_CHECK(left > 0, "of the ", bytes, " bytes of '", key, "' ", size.value_or(0),
                  " came, however often it was tried; see what the store says of it");
  }
}

void put_whole(ObjectStore& store, const fs::path& file, const std::string& key,
               std::uint64_t bytes, const TransferOptions& options) {
  move_whole(
      key, bytes, options, [&] { store.put(file, key); },
      [&] { return size_of(store, key, options); });
}

/// A save makes its files durable before the manifest, too.
void sync_file(const fs::path& file) {
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  const int result = fd < 0 ? fd : fsync(fd);
  const int error = errno;
  if (fd >= 0) {
    close(fd);
  }
  TESSERA_CHECK(result == 0, "cannot make '", file.string(), "' durable: ", std::strerror(error),
                ": name a folder on another disk");
}

/// Throws Error for bytes that are not those that were written. A file of another size is left to
/// move_whole().
void check_got(const fs::path& file, const FileRecord& record) {
  std::error_code fault;
  if (fs::file_size(file, fault) != record.bytes || fault) {
    return;
  }
  const CheckedFile got(files::InputFile(file, "a file of the step", files::Symlinks::kRefuse),
                        record.sums);
  std::vector<std::byte> buffer(kGranuleBytes);
  for (std::uint64_t at = 0; at < record.bytes; at += kGranuleBytes) {
    got.read_at(at, std::span(buffer).first(std::min(kGranuleBytes, record.bytes - at)));
  }
  sync_file(file);
}

void get_whole(ObjectStore& store, const std::string& key, const fs::path& file,
               const FileRecord& record, const TransferOptions& options) {
  move_whole(
      key, record.bytes, options,
      [&] {
        store.get(key, file);
        check_got(file, record);
      },
      [&]() -> std::optional<std::uint64_t> {
        std::error_code fault;
        const std::uint64_t size = fs::file_size(file, fault);
        return fault ? std::nullopt : std::optional(size);  // the command may have written none
      });
}

/// `move(file)` for the files of a step that are this rank's to move.
void move_own_files(comm::World& world, const Manifest& manifest,
                    const std::function<void(const FileRecord&)>& move) {
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    if (static_cast<int>(i) % world.size() == world.rank()) {
      move(manifest.files[i]);
      comm::note_progress(flight::Work::kWriting);
    }
  }
}

/// Runs `work` on rank 0, which returns a text for all ranks.
std::string from_rank_zero(comm::World& world, const std::function<std::string()>& work) {
  std::string text;
  run_or_fail_on_all(world, [&] {
    if (world.rank() == 0) {
      text = work();
    }
  });
  return comm::broadcast_text(*all_ranks(world), c10::kCPU, 0, text);
}

/// The manifest of a step in a store. `there`: where the file may be for a moment.
std::string manifest_in(ObjectStore& store, const std::string& key, const fs::path& there,
                        const TransferOptions& options) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 32;
  const auto remove = c10::make_scope_exit([&] {
    std::error_code ignored;
    fs::remove(there, ignored);
  });
  std::string text;
  with_retries(options, [&] {
    store.get(key + kManifestFile, there);
    text = files::read_file(there, "a manifest", kMostBytes);
    parse_manifest(text, key + kManifestFile);
  });
  return text;
}

/// Whether a step is there after all. A store's list may be empty because it has failed unseen.
bool gives_manifest(ObjectStore& store, const std::string& key, const fs::path& folder) {
  try {
    manifest_in(store, key, folder / "manifest.json.there", {.retries = 0});
    return true;
  } catch (const std::exception&) {  // there is none, or it can't be told
    return false;
  }
}

/// The manifest of the step that is wanted, on rank 0.
std::string wanted_manifest(ObjectStore& store, const std::string& prefix, const fs::path& dir,
                            std::optional<std::int64_t> step, const TransferOptions& options) {
  if (!step) {
    with_retries(options, [&] { step = newest_step_in(store, prefix); });
    TESSERA_CHECK(step, "the store has no step below '", prefix,
                  "'; give the prefix that the steps were pushed with");
  }
  files::create_folders(dir);
  return manifest_in(store, key_of_step(prefix, *step), dir / "manifest.json.pulled", options);
}

}  // namespace

std::int64_t push_step(comm::World& world, const fs::path& step, ObjectStore& store,
                       const std::string& prefix, const TransferOptions& options) {
  const fs::path folder = from_rank_zero(world, [&] { return find_step(step).string(); });
  Manifest manifest;
  std::string key;
  run_or_fail_on_all(world, [&] {
    manifest = read_manifest(folder);
    key = key_of_step(prefix, manifest.step);
    if (world.rank() == 0) {
      TESSERA_CHECK(
          !size_of(store, key + kManifestFile, options) && !gives_manifest(store, key, folder),
          "the store has '", key,
          "' already: remove its manifest.json first, or push another step");
    }
  });
  run_or_fail_on_all(world, [&] {
    move_own_files(world, manifest, [&](const FileRecord& file) {
      put_whole(store, folder / file.name, key + file.name, file.bytes, options);
    });
  });
  run_or_fail_on_all(world, [&] {
    if (world.rank() == 0) {
      const fs::path file = folder / kManifestFile;
      put_whole(store, file, key + kManifestFile, fs::file_size(file), options);
    }
  });
  return manifest.step;
}

std::optional<std::int64_t> newest_step_in(ObjectStore& store, const std::string& prefix) {
  std::optional<std::int64_t> newest;
  for (const ObjectStore::Object& object : store.list(beginning_below(prefix))) {
    const fs::path path = object.key;
    const auto step = step_of(path.parent_path());
    if (step && object.key == key_of_step(prefix, *step) + kManifestFile) {
      newest = std::max(newest.value_or(*step), *step);
    }
  }
  return newest;
}

fs::path pull_step(comm::World& world, ObjectStore& store, const std::string& prefix,
                   const fs::path& dir, std::optional<std::int64_t> step,
                   const TransferOptions& options) {
  const std::string text =
      from_rank_zero(world, [&] { return wanted_manifest(store, prefix, dir, step, options); });
  const Manifest manifest = parse_manifest(text, kManifestFile);
  const std::string key = key_of_step(prefix, manifest.step);
  // As a save makes it: until the manifest is there, the next save of the run may remove it.
  const StepFolder folder(dir, manifest.step, manifest.run_id);
  const auto on_rank_zero = [&](const std::function<void()>& work) {
    run_or_fail_on_all(world, [&] {
      if (world.rank() == 0) {
        work();
      }
    });
  };
  on_rank_zero([&] { folder.claim(); });
  try {
    run_or_fail_on_all(world, [&] {
      move_own_files(world, manifest, [&](const FileRecord& file) {
        get_whole(store, key + file.name, folder.path() / file.name, file, options);
      });
      files::sync_folder(folder.path());
    });
  } catch (const comm::PeerError&) {
    throw;  // the others may still write
  } catch (...) {
    if (world.rank() == 0) {
      folder.discard();
    }
    throw;
  }
  on_rank_zero([&] {
    folder.commit(text);
    folder.release();
  });
  return folder.path();
}

}  // namespace tessera::checkpoint
