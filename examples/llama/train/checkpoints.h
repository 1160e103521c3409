// Where a run starts, and what it leaves behind to be continued: --checkpoint, --resume and the
// flags that go with them.

#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "examples/llama/models.h"
#include "examples/llama/train/options/train_options.h"

namespace llama {

/// How far a run is.
struct Position {
  std::int64_t step = 0;     ///< optimizer steps that are done
  std::int64_t samples = 0;  ///< what they have taken of the data, on all ranks together
};

/// All that changes while a model is trained.
struct RunState {
  Llama& model;
  tessera::optim::Optimizer& optimizer;
  tessera::optim::GradScaler& scaler;
  Position& position;
};

/// The checkpoints of one run. The constructor, load(), the saves and settle() are collective over
/// `world`.
class Checkpoints {
 public:
  /// Looks for where to start. Throws tessera::Error if that is not what the flags say: for steps
  /// where a new run would begin, or none to resume.
  Checkpoints(const TrainOptions& options, tessera::comm::WorldPtr world);
  ~Checkpoints();
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  /// The folder that the run starts from; empty for a new run.
  const std::filesystem::path& source() const { return source_; }
  /// The step that load() has found there, as its own run counts.
  std::int64_t loaded_step() const { return loaded_; }
  /// Makes the folder and takes it for this run alone. Throws tessera::Error where it can't be
  /// written, or another process has it: better now than at the first save. For rank 0.
  void make_folder();
  /// Fills the state from source(). A damaged step that nobody has asked for by its number is
  /// passed over, with a warning, for the one before. Throws tessera::Error if there is none, and
  /// for data other than the checkpoint's.
  void load(const RunState& state);
  /// Whether a step is one of --checkpoint-every.
  bool is_due(std::int64_t step) const;
  /// Saves the state, unless this step has been saved: with --async from a copy, while training
  /// goes on. Returns for how many seconds training had to wait; nullopt if nothing was saved.
  /// Throws also what the save before has failed with.
  std::optional<double> save(const RunState& state);
  /// The same for a run that is told to stop, at once: that a save before has failed is only said.
  std::optional<double> save_at_once(const RunState& state);
  /// Returns when what save() has begun is there; before that the world must not end. False, with a
  /// warning, if it has failed: save_at_once() saves the step again.
  bool settle();
  /// The folder of a step.
  std::filesystem::path folder(std::int64_t step) const;

 private:
  void find_source();
  void begin_run();
  void go_on_from(std::int64_t step);
  void withdraw_damaged();
  void lock_folder();
  tessera::checkpoint::LoadReport load_whole_step(const tessera::checkpoint::StateDict& dict,
                                                  const tessera::checkpoint::LoadOptions& options);
  void pass_over(const tessera::checkpoint::DamagedStep& error);
  void check_last_save();
  template <class Save>
  std::optional<double> save_by(const RunState& state, const Save& save_state);
  nlohmann::json entries(const RunState& state) const;
  void check_fine_tuning_flags(const tessera::checkpoint::StateDict& dict);
  void apply(const tessera::checkpoint::LoadReport& report, const RunState& state);
  bool excludes(const char* part) const;

  const TrainOptions& options_;
  tessera::comm::WorldPtr world_;
  std::filesystem::path source_;
  /// The source is a step of this run, not of the one that --initial-load names.
  bool resumes_ = false;
  std::string run_id_;                 ///< of all the steps in the run's own folder
  std::int64_t newest_ = -1;           ///< the step that source() is of, in the run's own folder
  std::vector<std::int64_t> damaged_;  ///< later than source(), taken back by the first save
  int lock_ = -1;                      ///< the descriptor of the folder's locked file
  std::int64_t loaded_ = -1;           ///< loaded_step()
  std::int64_t saved_ = -1;            ///< the step that was saved or loaded last
  tessera::checkpoint::SaveFuture pending_;
  nlohmann::json data_;  ///< data_fingerprint()
};

}  // namespace llama
