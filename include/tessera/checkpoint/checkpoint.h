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
/// state is JSON and equal on every rank. save() stores the state of rank 0.
class Stateful {
 public:
  virtual ~Stateful() = default;
  virtual nlohmann::json state_dict() const = 0;
  /// Sets the state of the object. If the object throws for `state`, the load fails on all ranks.
  virtual void load_state_dict(const nlohmann::json& state) = 0;
};

/// An object whose JSON state differs between ranks, for example how much data a rank has read.
/// After a load on another number of ranks, rank 0 has the merged() state, and the other ranks are
/// reset. If the checkpoint lacks the state, all ranks are reset.
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

// Sharded checkpoints. Each rank writes its shards of the tensors. A load works on any mesh. A
// step folder without a valid manifest.json is ignored. docs/checkpoints.md describes the files.

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
  /// The id of the training run, for example from new_run_id(). Runs that share a folder need
  /// different ids. A restarted run must use its earlier id.
  std::string run_id = {};
  /// The number of saved steps of this run that remain on disk: the newest steps, including the
  /// step being saved. At least 2; 0 keeps all steps.
  int keep = 0;
};

/// Writes the state to DIR/step-00000100, then removes the oldest steps of this run, so that
/// options.keep steps remain. Rank 0 writes the tensors that are not distributed. If a save fails
/// or is killed, older steps are unchanged.
///
/// Collective over `world`. Throws Error, on all ranks:
/// - for an uninitialized parameter, or a parameter with set_distinct_along();
/// - if copies of a parameter, or of its optimizer state, differ between ranks;
/// - if models, steps, folders or options differ between ranks;
/// - if the step already exists, or a file cannot be written.
void save(comm::World& world, const std::filesystem::path& dir, std::int64_t step,
          const StateDict& state, const SaveOptions& options = {});

/// Thrown if a saved step has a valid manifest, but a file of the step is missing or damaged. For a
/// file that cannot be read at the moment, load() throws another Error.
class DamagedStep : public Error {
 public:
  using Error::Error;
};

/// Options of load(): which parts of a checkpoint are loaded.
struct LoadOptions {
  /// Patterns (nn::matches_fqn) of names that are not loaded and not reported as missing, such as
  /// "optimizer.**". load() throws Error for a pattern without a matching name, except
  /// "optimizer.**".
  std::vector<std::string> exclude = {};
  /// Patterns of names that may be missing, or may have other sizes or dtypes, in the checkpoint.
  /// LoadReport lists the names that were not loaded. All names without a matching pattern must be
  /// present and fit.
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
/// mesh and the number of ranks can differ from those of the save. Each rank reads the bytes of its
/// shards and verifies the checksums.
///
/// Collective over `world`. An error on one rank is thrown on all ranks. Throws Error, before
/// anything is changed, if names, sizes or dtypes do not fit, or the step does not exist. Throws
/// DamagedStep if a file is missing or damaged. If reading fails, the parameters count as
/// uninitialized; the ranks can then load an older step.
LoadReport load(comm::World& world, const std::filesystem::path& dir_or_step,
                const StateDict& state, const LoadOptions& options = {});

class BackgroundSave;

/// The handle of a background save. All copies of a SaveFuture refer to the same save. The
/// destructor of the last copy waits for the save. Call wait() before World::shutdown(). Not thread
/// safe: use all copies from one thread at a time.
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

/// Like save(), but returns after copying this rank's part of the state to CPU memory. A background
/// thread writes the copy while training continues.
///
/// Collective over `world`. The next save() or async_save() first waits for this save. If this save
/// fails and no wait() throws the error, the next save throws the error on all ranks and saves
/// nothing.
[[nodiscard]] SaveFuture async_save(comm::World& world, const std::filesystem::path& dir,
                                    std::int64_t step, const StateDict& state,
                                    const SaveOptions& options = {});

}  // namespace tessera::checkpoint
TESSERA_API_END
