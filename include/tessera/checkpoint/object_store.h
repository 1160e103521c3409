#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::checkpoint {

/// What every object store can do: objects are put whole, and none is renamed or appended to. An
/// adapter for one is a class of these three functions. Each throws Error where it fails, and may
/// be tried again. Ranks call them from their own threads.
class ObjectStore {
 public:
  /// An object that is there.
  struct Object {
    std::string key;
    std::uint64_t bytes = 0;
  };

  virtual ~ObjectStore() = default;
  /// Makes the bytes of a file the object of this key, in the place of one that is there.
  virtual void put(const std::filesystem::path& file, const std::string& key) = 0;
  /// Writes the object's bytes to a file.
  virtual void get(const std::string& key, const std::filesystem::path& file) = 0;
  /// The objects whose keys begin so; one that was put is among them.
  virtual std::vector<Object> list(const std::string& prefix) = 0;
};

/// The store that a program of its vendor reaches. Commands of the shell, in which {file} and {key}
/// stand for words:
///
///   {.put = "aws s3 cp {file} s3://bucket/{key}",
///    .get = "aws s3 cp s3://bucket/{key} {file}",
///    .list = "aws s3api list-objects-v2 --bucket bucket --prefix {key}"
///            " --query '(Contents || `[]`)[].[Size, Key]' --output text"}
///
/// `list` prints a line "BYTES KEY" for each object whose key begins with {key}, and nothing where
/// there is none. A command that fails ends with another status than 0, so it must not end in a
/// pipe, whose status is that of its last part: the last line that it has written is in the error.
/// While a command runs its rank counts as getting on: the command's own time-out ends a transfer.
struct StoreCommands {
  std::string put, get, list;
};
/// Each call runs its command, and throws Error with what it said where it fails.
std::unique_ptr<ObjectStore> command_store(StoreCommands commands);

/// How a step is moved to or from a store.
struct TransferOptions {
  int retries = 2;                        ///< of each object, after the first try
  std::chrono::milliseconds pause{1000};  ///< before the first of them; then twice as long each
};

/// Puts a step, or the newest one of a folder, into a store, as PREFIX/step-00000100/FILE. The
/// manifest comes last, once all other objects are there with their sizes: that is the commit, and
/// needs neither a rename nor a lock.
///
/// Collective over `world`, whose ranks see the folder and share its files. Returns the step's
/// number. A failure on one rank is an Error on all; the store then has no such step, but may have
/// some of its objects, which the next try replaces. Throws Error for a step that is there already:
/// the store lists its manifest, or gives it.
std::int64_t push_step(comm::World& world, const std::filesystem::path& step, ObjectStore& store,
                       const std::string& prefix, const TransferOptions& options = {});

/// The highest step of which the store has a manifest.
std::optional<std::int64_t> newest_step_in(ObjectStore& store, const std::string& prefix);

/// Gets a step from a store, the newest unless `step` says which, to DIR/step-00000100, which must
/// not be there. Every byte is compared with its checksum, and what differs is got again; the
/// manifest comes last. Collective over `world`, whose ranks see DIR and share the files. Returns
/// the folder. Throws Error as push_step(), and where the store has no such step.
std::filesystem::path pull_step(comm::World& world, ObjectStore& store, const std::string& prefix,
                                const std::filesystem::path& dir,
                                std::optional<std::int64_t> step = std::nullopt,
                                const TransferOptions& options = {});

}  // namespace tessera::checkpoint
TESSERA_API_END
