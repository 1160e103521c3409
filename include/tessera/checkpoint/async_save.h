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
  /// A future without a save: done.
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

/// As save(), but returns once the state has been copied to host memory, page-locked with a GPU.
/// The copy takes as much memory as this rank writes. A thread writes it while training continues,
/// and communicates over a separate group between the hosts.
///
///   pending = checkpoint::async_save(*world, "run", step, state);
///   stall = pending.stall_seconds();
///
/// Collective over `world`. One save is under way at a time: save() and async_save() first wait for
/// the one before. If it failed and wait() has not thrown its error on every rank, they throw that
/// error on all ranks and save nothing. Throws Error as save() does for what is found before
/// anything is written.
[[nodiscard]] SaveFuture async_save(comm::World& world, const std::filesystem::path& dir,
                                    std::int64_t step, const StateDict& state,
                                    const SaveOptions& options = {});

}  // namespace tessera::checkpoint
TESSERA_API_END
