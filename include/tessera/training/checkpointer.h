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
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/training/step.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// The names of a program and its options in messages: {"my_train", "--"} if flags have the
/// options' names.
struct RunNames {
  std::string program = "training";
  std::string dashes = "";  ///< in front of an option's name
};

/// Throws Error on every rank if the ranks of a job have different options. It names the first
/// option that differs and both values. `own`: value by name; an empty value is an option that is
/// not given. Call it before any other collective over `world`. Collective.
void check_same_options(comm::World& world, const std::map<std::string, std::string>& own);

/// Whether `own` is true on any rank of the mesh, with the same answer on all ranks. Call it after
/// each step, with StopSignals::received() or a time limit. Collective over `mesh`, between the
/// hosts, without a wait for a device.
bool stop_requested(bool own, const DeviceMesh& mesh);

/// Whether a run continues from the newest step in its folder.
enum class Resume : std::uint8_t {
  kNever,   ///< a new run; a folder with steps is an error
  kNewest,  ///< continue; a folder without steps is an error
  kAuto,    ///< continue, or a new run in an empty folder
};

/// Where a run starts, and which steps it saves.
struct CheckpointOptions {
  std::filesystem::path folder = {};  ///< for the run's steps; empty: none are saved
  std::int64_t every = 0;             ///< steps; 0: at the end only
  std::int64_t steps = 0;             ///< of the whole run; 0: it only loads
  bool async = true;                  ///< save from a copy while training continues
  int keep = 0;                       ///< number of newest steps that stay, at least 2; 0: all
  Resume resume = Resume::kNever;
  std::int64_t resume_step = -1;  ///< continue from this step instead; -1: not
  /// A step of another run, or a folder of steps: the initial state of a run.
  std::filesystem::path initial_load = {};
  /// "optimizer", "data": parts that are not loaded. A run that continues from its own steps loads
  /// all, also if it once began with `initial_load`.
  std::vector<std::string> exclude = {};
  RunNames names = {};
};

/// The checkpoints of a run: the step that it starts from, the steps that it saves, and failed
/// saves. The options' names in messages are "checkpoint", "resume", "resume-step", "initial-load",
/// "exclude" and "steps".
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
/// failure on one rank is an Error on all.
class Checkpointer {
 public:
  using Json = nlohmann::json;

  /// Finds the step to start from, and locks the folder, if it exists, as make_folder() does.
  /// Throws Error for steps in the folder of a new run, for no step to resume, and for wrong
  /// options.
  Checkpointer(CheckpointOptions options, comm::WorldPtr world);
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Whether there is a step to load, instead of values to initialise.
  bool loads() const { return !source_.empty(); }
  /// Whether that is a step of this run, and not of `initial_load`.
  bool resumes() const { return resumes_; }
  /// Whether `part` is left out: "optimizer" or "data".
  bool excludes(const char* part) const;
  /// The folder that the run starts from; empty for a new run.
  const std::filesystem::path& source() const { return source_; }
  /// The step that load() found, in the count of its own run.
  std::int64_t loaded_step() const { return loaded_; }
  /// The folder of a step.
  std::filesystem::path folder(std::int64_t step) const;

  /// Makes the folder and locks it for this run, until the process ends. Throws Error if it can't
  /// be written, or another process has locked it. For rank 0, not collective.
  void make_folder();
  /// The entries of the step that load() will read, for checks before tensors are read. They
  /// include those that the program passed to after_step().
  Json peek(const TrainState& state);
  /// Fills the state and, from a step of this run, the state of the random numbers. A damaged step
  /// is skipped for the step before, with a warning, unless the options name it. Returns its
  /// report. Throws Error if there is no whole step, and for a later step than the run's last one.
  checkpoint::LoadReport load(TrainState& state);

  /// Throws the Error of load() for a step that another program saved, with other entries.
  [[noreturn]] void fail_as_foreign() const;

  /// Saves the state if it is due: after every `every` steps, after the last step, and if the run
  /// is `stopped`; then without `async`. `entries`: further entries of the program. Returns how
  /// many seconds training had to wait; nullopt if nothing was saved. Throws the error of this save
  /// or of the one before; finish() returns the error of the last step.
  std::optional<double> after_step(const TrainState& state, const Json& entries = Json::object(),
                                   bool stopped = false);
  /// Waits for the last save, and repeats it if it failed. Returns the error of the second attempt,
  /// or nullptr. The world must exist until then. The program writes its other results before it
  /// rethrows the error.
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
  std::string run_id_;                 ///< of all the steps in the run's own folder
  std::int64_t newest_ = -1;           ///< the step that source() is of, in the run's own folder
  std::vector<std::int64_t> damaged_;  ///< later than source(), taken back by the first save
  int lock_ = -1;                      ///< the descriptor of the folder's locked file
  std::int64_t loaded_ = -1;           ///< loaded_step()
  std::int64_t saved_ = -1;            ///< the step that was saved or loaded last
  checkpoint::SaveFuture pending_;
  std::exception_ptr unsaved_;  ///< what the save of the last step has failed with
};

}  // namespace tessera::training
TESSERA_API_END
