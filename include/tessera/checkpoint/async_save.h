#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::checkpoint {

class BackgroundSave;

/// A save under way, or one that has ended. Copies are of the same save. When the last one goes, it
/// waits for the save to end; an error that neither wait() nor a later save has thrown is then a
/// warning. Wait before World::shutdown(). Thread safety: one thread at a time.
class SaveFuture {
 public:
  /// Of no save: done.
  SaveFuture() = default;

  /// Whether this rank's part has ended, well or not. Other ranks may still be at theirs.
  bool done() const;
  /// Returns when the step is there. Throws what save() would have thrown.
  void wait();
  /// For how long async_save() kept the caller: the wait for the save before, the checks, the copy.
  double stall_seconds() const { return stall_seconds_; }

 private:
  friend SaveFuture async_save(comm::World& world, const std::filesystem::path& dir,
                               std::int64_t step, const StateDict& state,
                               const SaveOptions& options);
  SaveFuture(std::shared_ptr<BackgroundSave> save, double stall_seconds);

  std::shared_ptr<BackgroundSave> save_;
  double stall_seconds_ = 0;
};

/// As save(), but returns once the state has been copied to the host: to memory of the size of what
/// this rank writes, on a GPU page-locked. A thread writes the copy while training goes on, and
/// communicates over a group of the hosts of its own.
///
///   pending = checkpoint::async_save(*world, "run", step, state);
///   stall = pending.stall_seconds();
///
/// Collective over `world`. One save is under way at a time: save() and async_save() first wait for
/// the one before, and throw its error, on all ranks, unless each rank was told by wait(). Nothing
/// is saved then. Throws Error as save() does for what is found before anything is written.
[[nodiscard]] SaveFuture async_save(comm::World& world, const std::filesystem::path& dir,
                                    std::int64_t step, const StateDict& state,
                                    const SaveOptions& options = {});

}  // namespace tessera::checkpoint
TESSERA_API_END
