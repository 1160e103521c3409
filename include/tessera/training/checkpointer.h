#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/world.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/training/step.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// The names of the program and its options in messages. For example, use {"my_train", "--"} if the
/// options are command-line flags with the same names.
struct RunNames {
  std::string program = "training";
  std::string dashes = "";  ///< prefix of an option's name in messages: "--" for flags
};

/// Throws Error on every rank if ranks have different options. `own`: options by name; an empty
/// value means not given. Call before any other collective over `world`. Collective.
void check_same_options(comm::World& world, const std::map<std::string, std::string>& own);

/// Returns whether `own`, such as StopSignals::received(), is true on any rank. Call after each
/// step. Collective over `mesh`, between CPUs: no rank waits for a GPU.
bool stop_requested(bool own, const DeviceMesh& mesh);

/// Whether a run continues from the newest checkpoint in its folder.
enum class Resume : std::uint8_t {
  kNever,   ///< a new run starts; a folder with checkpoints is an error
  kNewest,  ///< the run continues; a folder without checkpoints is an error
  kAuto,    ///< the run continues, or a new run starts if there is no checkpoint
};

/// Options of a Checkpointer: from which state a run starts, and after which steps the run saves.
struct CheckpointOptions {
  std::filesystem::path folder = {};  ///< folder of the run's checkpoints; empty: nothing is saved
  std::int64_t every = 0;             ///< number of steps between saves; 0: save at the end only
  std::int64_t steps = 0;  ///< number of steps of the whole run; 0: no training, only loads
  bool async = true;       ///< whether saves are written in the background, from a copy
  int keep = 0;            ///< how many checkpoints are retained, at least 2; 0: all
  Resume resume = Resume::kNever;
  std::int64_t resume_step = -1;  ///< step from which the run continues; -1: the newest step
  /// A checkpoint of another run from which a new run starts, or the folder of that run's
  /// checkpoints.
  std::filesystem::path initial_load = {};
  /// Parts of a checkpoint that are not loaded: "optimizer", "data". With `initial_load`, only the
  /// load of `initial_load` excludes the parts: a run that resumes from `folder` loads all parts.
  std::vector<std::string> exclude = {};
  RunNames names = {};
};

/// Manages the checkpoints of a run: finds the step to start from, saves steps, and handles failed
/// saves. Messages have the command-line names of options ("resume-step").
///
///   const training::Resume resume = training::Resume::kAuto;
///   training::Checkpointer checkpoints(
///       {.folder = "run", .every = 100, .steps = 1000, .resume = resume}, world);
///   ...  // model and optimizer
///   if (checkpoints.loads()) { checkpoints.load(state); }
///   for (bool stopped = false; state.step < 1000 && !stopped;) {
///     training::step(state, mesh["dp"], options, loss);
///     stopped = training::stop_requested(signals.received(), mesh);
///     checkpoints.after_step(state, entries, stopped);
///   }
///   const std::exception_ptr failed = checkpoints.finish(state, entries);
///   if (failed) { std::rethrow_exception(failed); }
///
/// The constructor, peek(), load(), after_step() and finish() are collective over `world`. A
/// failure on one rank is an Error on all ranks.
class Checkpointer : tessera::detail::NoCopy {
  using Json = nlohmann::json;

 public:
  /// Finds the step to start from, and locks an existing folder like make_folder(). Throws Error if
  /// the folder of a new run has steps, if no step can be resumed, and for invalid options.
  Checkpointer(CheckpointOptions options, comm::WorldPtr world);
  ~Checkpointer();

  /// Whether there is a saved step to load. Otherwise the program initializes the state.
  bool loads() const { return !source_.empty(); }
  /// Whether the step to load belongs to this run (and not to `initial_load`).
  bool resumes() const { return resumes_; }
  /// Whether the options exclude `part` from loading. `part` is "optimizer" or "data".
  bool excludes(const char* part) const;
  /// Returns the folder of the checkpoint from which the run starts; empty for a new run.
  const std::filesystem::path& source() const { return source_; }
  /// Returns the loaded checkpoint's step number, as counted by the run that saved the checkpoint.
  std::int64_t loaded_step() const { return loaded_; }
  /// Returns the folder in which a step is saved.
  std::filesystem::path folder(std::int64_t step) const;

  /// Creates the folder, and locks the folder until the process ends. Call on rank 0; not
  /// collective. Throws Error if the folder can't be written, or if another process has the lock.
  void make_folder();
  /// Returns the JSON object (without tensors) of the checkpoint that load() will load, for checks
  /// before load(). The object includes the `entries` that the program passed to after_step().
  Json peek(const TrainState& state);
  /// Loads the step into `state`; for a step of this run, also the random number state. If a step
  /// that the options do not name is damaged, warns and loads the previous step. Returns the report
  /// of checkpoint::load(). Throws Error without a complete step, and for a step after the run's
  /// last step.
  checkpoint::LoadReport load(TrainState& state);

  /// Throws the Error that load() throws for a checkpoint of another program; never returns.
  [[noreturn]] void fail_as_foreign() const;

  /// Saves the state after every `every` steps, the last step and a stop (then without `async`).
  /// `entries`: JSON values to add to the checkpoint. Returns the seconds that training waited, or
  /// nullopt without a save. Throws the errors of this save and, with `async`, of the previous
  /// save. After the last step, finish() returns these errors instead.
  std::optional<double> after_step(const TrainState& state, const Json& entries = Json::object(),
                                   bool stopped = false);
  /// Waits for the last save, and repeats a failed save once. Returns the error of the second
  /// attempt, or nullptr. The world must exist until finish() returns. Write other results before
  /// rethrowing.
  [[nodiscard]] std::exception_ptr finish(const TrainState& state,
                                          const Json& entries = Json::object());

 private:
  std::string option(const char* name) const { return options_.names.dashes + name; }
  void check_options() const;
  void find_source();
  void begin_run();
  void go_on_from(std::int64_t step);
  void withdraw_damaged();
  void lock_folder();
  void warn(const std::string& text) const;
  checkpoint::LoadReport load_whole_step(const checkpoint::StateDict& dict,
                                         const checkpoint::LoadOptions& options);
  void pass_over(const checkpoint::DamagedStep& error);
  void apply(const checkpoint::LoadReport& report, TrainState& state);
  void check_last_save();
  bool settle();
  std::optional<double> save(const TrainState& state, const Json& entries, bool at_once);

  CheckpointOptions options_;
  comm::WorldPtr world_;
  std::filesystem::path source_;
  bool resumes_ = false;
  std::string run_id_;
  std::int64_t newest_ = -1;  ///< step number of source(); -1 if source() is not in `folder`
  /// Numbers of saved steps later than the loaded step; the first save marks them as unfinished.
  std::vector<std::int64_t> damaged_;
  int lock_ = -1;
  std::int64_t loaded_ = -1;
  std::int64_t saved_ = -1;
  checkpoint::SaveFuture pending_;
  std::exception_ptr unsaved_;
};

}  // namespace tessera::training
TESSERA_API_END
