#pragma once

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

/// An object whose state is saved in checkpoints, for example a schedule or a loss scaler. The
/// state is a JSON value, equal on every rank. A save stores the state of rank 0. A load sets this
/// state on every rank.
class Stateful {
 public:
  virtual ~Stateful() = default;
  virtual nlohmann::json state_dict() const = 0;
  /// Sets the state of the object. If the object throws for `state`, the load fails on all ranks.
  virtual void load_state_dict(const nlohmann::json& state) = 0;
};

/// An object whose JSON state differs between ranks, for example how much data a rank has read. A
/// save stores the state of each rank. A load on the same number of ranks restores the state of
/// each rank. On a different number of ranks, rank 0 gets the result of merged() for all states,
/// and the other ranks are reset, so that nothing is counted twice. If the checkpoint lacks the
/// object's state, the object is reset on all ranks.
class RankState {
 public:
  virtual ~RankState() = default;
  virtual nlohmann::json state_dict() const = 0;
  virtual void load_state_dict(const nlohmann::json& state) = 0;
  /// Returns one state that combines the states of several ranks.
  virtual nlohmann::json merged(const std::vector<nlohmann::json>& of_ranks) const = 0;
  /// Resets the object to its initial state.
  virtual void reset() = 0;
  /// Whether checkpoints save the state of the object. A load resets an object that is not
  /// persistent.
  virtual bool persistent() const { return true; }
};

// Sharded checkpoints: each rank writes its shards of the tensors. A load works on any mesh, and
// each rank reads only the bytes of its shards. The files have the format of PyTorch's
// HuggingFaceStorageWriter. A step folder without a valid manifest.json counts as unfinished and is
// ignored. docs/checkpoints.md describes the layout.

/// The state that a checkpoint saves and loads.
///
///   checkpoint::save(world, "run", step, {model, optim::named_state(optimizer, model), entries});
struct StateDict {
  /// The model, with or without TP and FSDP applied. Its parameters, its persistent buffers and the
  /// call counter of each nn::Dropout are saved.
  nn::ModuleBase& model;
  /// The optimizer state: the result of optim::named_state(), saved as "optimizer.state.NAME". The
  /// tensors share memory with the optimizer.
  std::vector<std::pair<std::string, at::Tensor>> optimizer = {};
  /// A JSON object that the caller defines, for example the schedule's step, the random state and
  /// the position in the data. The object of rank 0 is saved.
  nlohmann::json entries = nlohmann::json::object();
  /// Objects whose state is equal on all ranks. The state of rank 0 is saved; a load sets this
  /// state on all ranks.
  std::vector<std::pair<std::string, Stateful*>> stateful = {};
  /// Objects whose state differs between ranks, such as metrics. A name may appear only once in
  /// `stateful` and `rank_states` together.
  std::vector<std::pair<std::string, RankState*>> rank_states = {};
};

/// Options of save() and async_save().
struct SaveOptions {
  /// The id of the training run, for example from new_run_id(). Steps and unfinished saves store
  /// the id. Runs that share a folder need different ids; a restarted run must use its earlier id.
  std::string run_id = {};
  /// The number of saved steps of this run that remain on disk: the newest steps, including the
  /// step being saved. At least 2; 0 keeps all steps.
  int keep = 0;
};

/// Writes the state to DIR/step-00000100. A relative DIR is resolved at the call. If several ranks
/// have the same block of a tensor, one of these ranks writes the block. Rank 0 writes tensors that
/// are not distributed; plain buffers, such as a norm's running statistics, can differ between
/// ranks. load() finds the step only after every byte is durable. Then save() removes the
/// oldest steps of this run, so that options.keep steps remain.
///
/// Collective over `world`. If save() fails, or the process is killed, older steps and the model
/// are unchanged. A failure on one rank is the same Error on all ranks. Throws Error, before
/// anything is written, for:
/// - uninitialized parameters, and parameters for which set_distinct_along() was called;
/// - copies of a parameter or of its optimizer state that differ between ranks (a plain parameter
/// has a copy on every rank; a distributed parameter has copies along the dimensions of the root
/// mesh that are not in the parameter's mesh);
/// - step counters of the optimizer that differ between ranks with shards of one parameter;
/// - models, steps, folders or options that differ between ranks;
/// - a step that already exists.
void save(comm::World& world, const std::filesystem::path& dir, std::int64_t step,
          const StateDict& state, const SaveOptions& options = {});

/// Thrown if files of a saved step are missing or damaged although the step's manifest is valid. If
/// a file cannot be read at the moment, load() throws an Error of another type.
class DamagedStep : public Error {
 public:
  using Error::Error;
};

/// Options of load(): which parts of a checkpoint are loaded.
struct LoadOptions {
  /// Patterns (nn::matches_fqn) of names that are not loaded and not reported as missing, for
  /// example "optimizer.**". load() throws Error for a pattern that matches no name in the step or
  /// in the state, except for "optimizer.**".
  std::vector<std::string> exclude = {};
  /// Patterns of names that are loaded only if the names are in both the state and the checkpoint,
  /// with compatible sizes and dtypes. LoadReport lists the names that were left unchanged. All
  /// other names must be present and fit. Example: a run that continues with a frozen backbone has
  /// no optimizer state for the backbone, and passes {"optimizer.state.backbone.**"}.
  std::vector<std::string> partial = {};
};

/// Lists what load() loaded, and where the state and the checkpoint differed.
struct LoadReport {
  std::int64_t step = 0;
  nlohmann::json entries;               ///< the StateDict::entries that the checkpoint contains
  std::vector<std::string> missing;     ///< names in the state but not in the checkpoint
  std::vector<std::string> unexpected;  ///< names in the checkpoint but not in the state
  /// Names that were not loaded because of a different size or an inconvertible dtype.
  std::vector<std::string> reshaped;
};

/// Fills the model and the optimizer state from a step, or from the newest step of a folder. The
/// mesh and the number of ranks can differ from those of the save. Rank 0 chooses the step. Each
/// rank reads the bytes of its shards, rounded to whole MiB, and verifies the checksum of each MiB.
///
/// Collective over `world`. A failure on one rank is an Error on all ranks. Throws Error, before
/// anything is changed, if folders or options differ between ranks, if the step does not exist, if
/// names, sizes or dtypes do not fit, and if the step has two different tensors for a tied
/// parameter (or for its optimizer state). Throws DamagedStep if a file is missing or damaged. If
/// reading fails or finds damage, the parameters being loaded count as uninitialized; all ranks may
/// then load an older step. The `stateful` and `rank_states` objects are loaded before the first
/// parameter changes, the nn::Dropout call counters after the last parameter. Missing or unexpected
/// entries of `rank_states` are no error.
LoadReport load(comm::World& world, const std::filesystem::path& dir_or_step,
                const StateDict& state, const LoadOptions& options = {});

class BackgroundSave;

/// The handle of a background save, pending or finished. Copies of a SaveFuture refer to the same
/// save. The destructor of the last copy waits for the save, and prints a warning if the save
/// failed and no call has thrown the error. Call wait() before World::shutdown(). Not thread safe:
/// use all copies from one thread at a time.
class SaveFuture {
 public:
  /// Constructs a SaveFuture without a save: done() returns true.
  SaveFuture() = default;

  /// Whether this rank has written its part of the checkpoint, or the save has failed. Other ranks
  /// can still be writing.
  bool done() const;
  /// Waits until the step that is being saved is complete. Throws the errors of save().
  void wait();

 private:
  friend SaveFuture async_save(comm::World& world, const std::filesystem::path& dir,
                               std::int64_t step, const StateDict& state,
                               const SaveOptions& options);
  explicit SaveFuture(std::shared_ptr<BackgroundSave> save);

  std::shared_ptr<BackgroundSave> save_;
};

/// Like save(), but returns after the state has been copied to CPU memory (page-locked if there is
/// a GPU). The copy needs as much memory as this rank writes. A background thread writes the copy
/// while training continues, and communicates over a separate CPU process group.
///
/// Collective over `world`. save() and async_save() first wait for the previous save. If the
/// previous save failed and wait() has not thrown its error on every rank, both functions throw
/// this error on all ranks and save nothing. async_save() also throws the errors that save() finds
/// before it writes.
[[nodiscard]] SaveFuture async_save(comm::World& world, const std::filesystem::path& dir,
                                    std::int64_t step, const StateDict& state,
                                    const SaveOptions& options = {});

}  // namespace tessera::checkpoint
TESSERA_API_END
