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

/// What messages call a program and its options: a program whose flags bear the options' names says
/// {"my_train", "--"}.
struct RunNames {
  std::string program = "training";
  std::string dashes = "";  ///< in front of an option's name
};

/// Throws Error on every rank where the ranks of a job were started with different options, which
/// would train something else without a sign: it names the first option that differs and both
/// values. `own`: value by name; an empty value is an option that is not given. To be called before
/// anything else that is collective over `world`. Collective.
void check_same_options(comm::World& world, const std::map<std::string, std::string>& own);

/// Whether `own` is true on any rank of the mesh: the same on all of them, or some would end and
/// others wait for them. To be asked after each step, of StopSignals::received() or a time limit.
/// Collective over `mesh`, between the hosts: a device is not waited for.
bool stop_requested(bool own, const DeviceMesh& mesh);

/// Whether a run continues from the newest step in its folder.
enum class Resume : std::uint8_t {
  kNever,   ///< it begins; a folder that has steps is an error
  kNewest,  ///< there must be a step
  kAuto,    ///< it begins in an empty folder
};

/// Where a run starts, and what it leaves to be continued.
struct CheckpointOptions {
  std::filesystem::path folder = {};  ///< for the run's steps; empty: none are saved
  std::int64_t every = 0;             ///< steps; 0: at the end only
  std::int64_t steps = 0;             ///< of the whole run; 0: it only loads
  bool async = true;                  ///< save from a copy while training continues
  int keep = 0;                       ///< the newest so many steps stay, at least 2; 0: all
  Resume resume = Resume::kNever;
  std::int64_t resume_step = -1;  ///< go on with this step instead; -1: not
  /// A step, or a folder of these, of another run, whose state a run begins with.
  std::filesystem::path initial_load = {};
  /// "optimizer", "data": what is not loaded. Where a run goes on with steps of its own that once
  /// began with `initial_load`, nothing is left out.
  std::vector<std::string> exclude = {};
  RunNames names = {};
};

/// The checkpoints of a run: which step it starts from, when it saves, and what becomes of a save
/// that fails. The options' names in messages are "checkpoint", "resume", "resume-step",
/// "initial-load", "exclude" and "steps".
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

  /// Looks for where to start, in a folder that it takes for this run alone, as make_folder() does,
  /// if it is there. Throws Error if that is not what the options say: for steps where a
  /// new run would begin, or none to resume; and for options that make no sense.
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
  /// The step that load() has found there, as its own run counts.
  std::int64_t loaded_step() const { return loaded_; }
  /// The folder of a step.
  std::filesystem::path folder(std::int64_t step) const;

  /// Makes the folder and takes it for this run alone, until the process ends. Throws Error where
  /// it can't be written, or another process has it: better now than at the first save. For rank 0,
  /// not collective.
  void make_folder();
  /// The entries of the step that load() will take, for what is to be checked before tensors are
  /// read. The program's own are those that it has passed to after_step().
  Json peek(const TrainState& state);
  /// Fills the state, and of a step of this run the state of the random numbers too. A damaged step
  /// that nobody has asked for by its number is passed over, with a warning, for the one before.
  /// Returns what was saved with it. Throws Error if there is no whole step, and for one of a later
  /// step than the run has.
  checkpoint::LoadReport load(TrainState& state);

  /// Throws the Error that load() throws for a step that another program has saved: for the entries
  /// that this one misses.
  [[noreturn]] void fail_as_foreign() const;

  /// Saves the state where it is due: every so many steps, at the run's last one, and where the run
  /// was asked to stop; then at once, and without `async`. `entries`: of the program's own,
  /// saved beside what load() takes back. Returns for how many seconds training had to wait;
  /// nullopt if nothing was saved. Throws what this save, or the one before, has failed with; of
  /// the last step finish() does.
  std::optional<double> after_step(const TrainState& state, const Json& entries = Json::object(),
                                   bool stopped = false);
  /// What the last save has failed with where the second attempt, which this makes, fails as well;
  /// else nullptr. Returns when all is written; before that the world must not end. The program
  /// writes its other results before it rethrows this.
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
