#pragma once

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/stateful.h"
#include "tessera/core/error.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}
namespace tessera::nn {
class ModuleBase;
}

namespace tessera::checkpoint {

// Sharded checkpoints: every rank writes its own part and reads what it needs, on any mesh. The
// files are those of PyTorch's HuggingFaceStorageWriter and a manifest.json, which is the commit:
// a step without a valid one does not exist. docs/checkpoints.md has the layout.

/// What a checkpoint holds.
///
///   checkpoint::save(world, "run", step, {model, optim::named_state(optimizer, model), entries});
struct StateDict {
  /// Plain, or with TP and FSDP applied: its parameters, persistent buffers, and how often each
  /// nn::Dropout was called.
  nn::ModuleBase& model;
  /// optim::named_state(): saved as "optimizer.state.NAME". The values share the optimizer's
  /// memory.
  std::vector<std::pair<std::string, at::Tensor>> optimizer = {};
  /// A JSON object of the caller's: the step of the schedule, random state, the position in the
  /// data. Those of rank 0 are saved.
  nlohmann::json entries = nlohmann::json::object();
  /// Objects whose state is equal on all ranks. Rank 0's is saved; a load sets it on all ranks.
  NamedStateful stateful = {};
  /// Objects of each rank's own, such as metrics. Names are unique among all objects.
  NamedRankStates rank_states = {};
};

/// How a step is saved.
struct SaveOptions {
  /// Marks the remains of unfinished saves: runs that share a folder need different ones, and a
  /// restarted run needs the same one as before.
  std::string run_id = {};
  /// The number of steps of this run that stay, including this one: at least 2. 0: all.
  int keep = 0;
};

/// "step-00000100": the folder of a step below that of the run.
std::string step_folder_name(std::int64_t step);

/// Writes the state to DIR/step-00000100. A relative DIR is resolved at the call. Blocks that
/// several ranks have are written once, and the work is spread over these ranks. Rank 0 writes
/// plain tensors; buffers may differ between ranks, such as the statistics of a norm. The step
/// exists for later loads when every byte is durable. Then steps of this run beyond options.keep
/// are removed.
///
/// Collective over `world`. If it fails or is killed at any moment, all older steps are intact, and
/// the model is not changed; a failure on one rank is the same Error on all. Throws Error, before
/// anything is written, for parameters that were never filled, parameters with set_distinct_along,
/// copies of a parameter or an optimizer's state that differ (over mesh dimensions that the
/// tensor's mesh lacks; of plain parameters, over all ranks), step counters that differ between
/// ranks that hold parts of one parameter, models, steps, folders or options that differ between
/// ranks, and a step that exists.
void save(comm::World& world, const std::filesystem::path& dir, std::int64_t step,
          const StateDict& state, const SaveOptions& options = {});

/// Files of a step are missing or damaged, though its manifest is valid. A file that cannot be read
/// for the moment is another Error.
class DamagedStep : public Error {
 public:
  using Error::Error;
};

/// What of a step is loaded.
struct LoadOptions {
  /// Patterns of names that are neither loaded nor missed (nn::matches_fqn): "optimizer.**". Error
  /// for one, other than this, that matches no name of the step or of the state.
  std::vector<std::string> exclude = {};
  /// Load the names that are present and fit. LoadReport lists what was left unchanged.
  bool partial = false;
  /// The same for names that match these patterns only: all others must be present and fit. A run
  /// that continues with a part of the model frozen has no place for the optimizer's state of that
  /// part: {"optimizer.state.backbone.**"}.
  std::vector<std::string> partial_names = {};
};

/// What was loaded, and where the state and the checkpoint differed.
struct LoadReport {
  std::int64_t step = 0;
  std::string run_id;
  nlohmann::json entries;               ///< StateDict::entries as they were saved
  std::vector<std::string> missing;     ///< in the state, not in the checkpoint
  std::vector<std::string> unexpected;  ///< in the checkpoint, not in the state
  std::vector<std::string> cast;        ///< converted between floating-point types
  std::vector<std::string> reshaped;    ///< not loaded: another size, or no conversion of the type
};

/// Fills the model and the optimizer's state from a step, or the newest step of a folder, that was
/// saved on any mesh and number of ranks. Rank 0 chooses the step. Each rank reads the bytes of its
/// shards, to the MiB, and compares them with their checksums.
///
/// Collective over `world`. A failure on one rank is an Error on all. Throws Error, before anything
/// is changed, if folders or options differ between ranks, if there is no such step, if names,
/// sizes or types do not fit, and if a tied parameter (or an optimizer's state of one) is two
/// tensors of other values in the step; then DamagedStep if a file is missing or damaged. If the
/// damage is found while bytes are read, or reading fails, the parameters being loaded count as
/// never filled: all ranks may load an older step. Objects take their states before the first
/// parameter changes, and nn::Dropouts their counts after the last; those of each rank's own may be
/// missing or unexpected.
LoadReport load(comm::World& world, const std::filesystem::path& dir_or_step,
                const StateDict& state, const LoadOptions& options = {});

class BackgroundSave;

/// A save in the background, pending or finished. Copies refer to the same save. The destructor of
/// the last copy waits for the save; it warns of an error that neither wait() nor a later save has
/// thrown. Wait before World::shutdown(). Thread safety: one thread at a time.
class SaveFuture {
 public:
  /// A future without a save: done.
  SaveFuture() = default;

  /// Whether this rank's part has finished or failed. Other ranks may still write.
  bool done() const;
  /// Returns when the step exists. Throws the errors of save().
  void wait();
  /// The time that async_save() took: the wait for the previous save, the checks, the copy.
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
/// Collective over `world`. save() and async_save() first wait for the previous save. If it failed
/// and wait() has not thrown its error on every rank, they throw that error on all ranks and save
/// nothing. Throws the errors of save() that are found before anything is written.
[[nodiscard]] SaveFuture async_save(comm::World& world, const std::filesystem::path& dir,
                                    std::int64_t step, const StateDict& state,
                                    const SaveOptions& options = {});

}  // namespace tessera::checkpoint
TESSERA_API_END
