// The checkpoints of a training run: when to save, from which saved step to resume, which options
// must be equal on all ranks, and how all ranks stop together.

#include "tessera/training/checkpointer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iostream>
#include <system_error>
#include <utility>

#include "tessera/checkpoint/detail/run_folder.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/random.h"

namespace tessera::training {

bool stop_requested(bool own, const DeviceMesh& mesh) {
  std::array<std::uint8_t, 1> requested{static_cast<std::uint8_t>(own)};
  if (mesh.size() > 1) {
    mesh.flatten().group().any_rank(requested);
  }
  return requested[0] != 0;
}

namespace {

std::string given(const std::string& name, const std::string& value) {
  return value.empty() ? "no " + name : name + " " + value;
}

}  // namespace

void check_same_options(comm::World& world, const std::map<std::string, std::string>& own) {
  using nlohmann::json;
  const comm::CommunicatorPtr group = world.host_group(comm::ranks_of_world(world.size()), "start");
  const std::vector<std::string> texts = comm::texts_that_differ(
      *group, json(own).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace));
  if (texts.empty()) {
    return;
  }
  const json first = json::parse(texts[0]);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    const json second = json::parse(texts[rank]);
    json all = first;
    all.update(second);
    for (const auto& [name, unused] : all.items()) {
      const std::string value = first.value(name, ""), theirs = second.value(name, "");
      TESSERA_CHECK(value == theirs, "rank ", rank, " has ", given(name, theirs),
                    ", but rank 0 has ", given(name, value),
                    "; start all ranks with the same options");
    }
  }
}

using Json = nlohmann::json;

namespace {

void unlock(int lock) {
  if (lock >= 0) {
    close(lock);
  }
}

}  // namespace

Checkpointer::Checkpointer(CheckpointOptions options, comm::WorldPtr world)
    : options_(std::move(options)), world_(std::move(world)) {
  check_options();
  // The folder becomes an absolute path, so that a later chdir() has no effect on saves.
  options_.folder = files::absolute_path(options_.folder);
  if (!options_.folder.empty()) {
    try {
      // The folder is locked before files are read: a run that is ending can still save to it.
      const auto group = world_->host_group(comm::ranks_of_world(world_->size()), "start");
      comm::run_or_fail_together(*group, c10::kCPU, [this] {
        std::error_code missing;
        if (world_->rank() == 0 && std::filesystem::is_directory(options_.folder, missing)) {
          make_folder();
        }
      });
      find_source();
    } catch (...) {
      unlock(lock_);  // the destructor is not called if the constructor throws
      throw;
    }
  }
  if (!resumes_) {
    source_ = options_.initial_load;
  }
}

/// Checks the checkpoint options before training, because the first save can be hours later.
void Checkpointer::check_options() const {
  TESSERA_CHECK(options_.keep == 0 || options_.keep >= 2, option("keep"), " is ", options_.keep,
                "; keep 2 or more checkpoints, because the newest checkpoint can be damaged, or "
                "pass 0 to keep all");
  TESSERA_CHECK(options_.every >= 0, option("checkpoint-every"), " is ", options_.every,
                "; pass 1 or more, or 0 for one checkpoint at the end");
  for (const std::string& part : options_.exclude) {
    TESSERA_CHECK(part == "optimizer" || part == "data", option("exclude"), ": '", part,
                  "' can't be excluded; pass optimizer or data");
  }
}

void Checkpointer::find_source() {
  const std::string dir = options_.folder.string();
  const std::optional<std::int64_t> newest = checkpoint::newest_step(*world_, dir);
  const std::optional<std::int64_t> last = checkpoint::detail::last_step(*world_, dir);
  resumes_ = newest && options_.resume != Resume::kNever;
  if (options_.resume_step >= 0) {
    resumes_ = true;
    // Saved steps after --resume-step are an error. The run will save steps with the same numbers,
    // and until then the old steps would count as the newest steps.
    TESSERA_CHECK(options_.steps == options_.resume_step || last <= options_.resume_step,
                  option("resume-step"), " ", options_.resume_step, ": '", dir,
                  "' has later steps, up to ", last.value_or(0), "; move later steps away first");
  }
  const std::string resume = option("resume");
  TESSERA_CHECK(resumes_ || options_.resume != Resume::kNewest, resume, ": '", dir,
                "' has no complete step; to start a new run in an empty folder, pass ", resume,
                " auto");
  TESSERA_CHECK(resumes_ || options_.resume != Resume::kAuto || !last, resume, " auto: '", dir,
                "' has steps, but no complete step; remove the steps to start a new run");
  TESSERA_CHECK(resumes_ || !last, option("checkpoint"), ": '", dir, "' has steps of a run; pass ",
                resume, " to continue the run, or another folder");
  if (resumes_) {
    go_on_from(options_.resume_step >= 0 ? options_.resume_step : *newest);
  } else {
    begin_run();
  }
}

/// With --resume auto, a run that was killed before its first complete step keeps its run_id, so
/// that the run can overwrite its unfinished step.
void Checkpointer::begin_run() {
  std::optional<std::string> before;
  if (options_.resume == Resume::kAuto) {
    before = checkpoint::detail::unfinished_run(*world_, options_.folder);
  }
  run_id_ = before ? *before : checkpoint::new_run_id(*world_);
  checkpoint::detail::steps_to_withdraw(*world_, options_.folder, -1, run_id_);
}

/// Sets the saved step from which the run continues. The next save marks later saved steps
/// (damaged_) as unfinished, so that the run can save these steps again.
void Checkpointer::go_on_from(std::int64_t step) {
  newest_ = step;
  source_ = folder(step);
  run_id_ = checkpoint::run_of_step(*world_, options_.folder, step);
  if (options_.resume_step < 0 || options_.steps > step) {
    damaged_ = checkpoint::detail::steps_to_withdraw(*world_, options_.folder, step, run_id_);
  }
}

void Checkpointer::make_folder() {
  if (options_.folder.empty()) {
    return;
  }
  std::error_code error;
  std::filesystem::create_directories(options_.folder, error);
  if (!error && access(options_.folder.c_str(), W_OK | X_OK) != 0) {
    error.assign(errno, std::generic_category());
  }
  TESSERA_CHECK(!error, option("checkpoint"), ": '", options_.folder.string(),
                "' can't be written: ", error.message(), "; pass another folder");
  lock_folder();
}

/// Locks the checkpoint folder for the life of this object. Has no effect without file locks.
void Checkpointer::lock_folder() {
  if (lock_ >= 0) {
    return;
  }
  const std::string file = (options_.folder / ".lock").string();
  lock_ = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  TESSERA_CHECK(lock_ >= 0, option("checkpoint"), ": '", file,
                "' can't be created: ", std::strerror(errno), "; pass another folder");
  TESSERA_CHECK(flock(lock_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, option("checkpoint"),
                ": '", options_.folder.string(),
                "' is in use by another run; stop that run, or pass another folder");
}

Checkpointer::~Checkpointer() {
  unlock(lock_);
}

void Checkpointer::warn(const std::string& text) const {
  if (world_->rank() == 0) {
    std::cerr << fmt::format("{}: warning: {}\n", options_.names.program, text);
  }
}

/// Whether the load excludes `part`, such as "optimizer". If options_.initial_load is set, only the
/// initial load excludes parts: a run that resumes loads its own checkpoint completely.
bool Checkpointer::excludes(const char* part) const {
  if (resumes_ && !options_.initial_load.empty()) {
    return false;
  }
  return std::ranges::find(options_.exclude, part) != options_.exclude.end();
}

Json Checkpointer::peek(const TrainState& state) {
  return load_whole_step({state.model}, {.exclude = {"**"}, .partial = {"**"}}).entries;
}

checkpoint::LoadReport Checkpointer::load(TrainState& state) {
  checkpoint::StateDict dict{state.model};
  checkpoint::LoadOptions load_options;
  if (excludes("optimizer")) {
    load_options.exclude = {"optimizer.**"};
  } else {
    dict.optimizer = optim::named_state(state.optimizer, state.model);
  }
  checkpoint::LoadReport report = load_whole_step(dict, load_options);
  try {
    apply(report, state);
  } catch (const Json::exception&) {
    fail_as_foreign();
  }
  return report;
}

void Checkpointer::fail_as_foreign() const {
  fail("the checkpoint '", source_.string(), "' was not saved by ", options_.names.program,
       "; to load only the weights, pass ", option("initial-load"), " and ", option("exclude"),
       " optimizer,data");
}

checkpoint::LoadReport Checkpointer::load_whole_step(const checkpoint::StateDict& dict,
                                                     const checkpoint::LoadOptions& options) {
  while (true) {
    try {
      return checkpoint::load(*world_, source_, dict, options);
    } catch (const checkpoint::DamagedStep& error) {
      if (!resumes_ || options_.resume_step >= 0) {
        throw;
      }
      pass_over(error);
    }
  }
}

/// After loading a saved step has failed with `error`, selects the next older step. The error is
/// the same on all ranks, so all ranks select the same step.
void Checkpointer::pass_over(const checkpoint::DamagedStep& error) {
  const std::int64_t damaged = newest_;
  const auto older = checkpoint::newest_step(*world_, options_.folder, damaged);
  TESSERA_CHECK(older, option("resume"), ": ", error.what(), "; '", options_.folder.string(),
                "' has no older step");
  go_on_from(*older);
  warn(fmt::format("step {} is damaged and is skipped: {}", damaged, error.what()));
}

void Checkpointer::apply(const checkpoint::LoadReport& report, TrainState& state) {
  const Json& entries = report.entries;
  loaded_ = report.step;
  // A run of 0 steps reads no data, so it does not need the position in the data.
  if (!excludes("data") && options_.steps > 0) {
    state.samples = entries.at("samples");
  }
  if (!excludes("optimizer") && state.scaler.enabled()) {
    // "loss_scaler" is null if the run that saved the step did not use loss scaling.
    if (const Json& saved = entries.at("loss_scaler"); !saved.is_null()) {
      state.scaler.load_state(
          {.scale = saved.at("scale"), .steps_since_overflow = saved.at("steps_since_overflow")});
    }
  }
  if (!resumes_) {
    return;
  }
  const Json& random = entries.at("random");
  set_random_state({.seed = random.at("seed"), .calls = random.at("calls")});
  // A run of 0 steps can load any saved step, for example to export the weights.
  TESSERA_CHECK(options_.steps == 0 || report.step <= options_.steps, "the checkpoint '",
                source_.string(), "' is of step ", report.step, ", after ", option("steps"), " ",
                options_.steps, "; pass ", option("steps"), " ", report.step, " or more");
  state.step = saved_ = report.step;
}

/// Marks the steps in damaged_ as unfinished. Called just before a save, so that a run that never
/// saves discards no step.
void Checkpointer::withdraw_damaged() {
  for (const std::int64_t step : std::exchange(damaged_, {})) {
    if (world_->rank() == 0) {
      checkpoint::detail::withdraw_step(options_.folder, step, run_id_);
    }
  }
}

std::optional<double> Checkpointer::save(const TrainState& state, const Json& entries,
                                         bool at_once) {
  if (at_once) {
    settle();
  }
  if (options_.folder.empty() || saved_ == state.step) {
    return std::nullopt;
  }
  Json all = entries;
  all["samples"] = state.samples;
  const RandomState random = random_state();
  all["random"] = {{"seed", random.seed}, {"calls", random.calls}};
  const optim::GradScaler::State& scaler = state.scaler.state();
  all["loss_scaler"] =
      state.scaler.enabled()
          ? Json{{"scale", scaler.scale}, {"steps_since_overflow", scaler.steps_since_overflow}}
          : Json();
  const checkpoint::StateDict dict{state.model, optim::named_state(state.optimizer, state.model),
                                   std::move(all)};
  const checkpoint::SaveOptions save_options{.run_id = run_id_, .keep = options_.keep};
  const auto start = std::chrono::steady_clock::now();
  withdraw_damaged();
  try {
    if (at_once) {
      checkpoint::save(*world_, options_.folder, state.step, dict, save_options);
    } else {
      check_last_save();
      pending_ = checkpoint::async_save(*world_, options_.folder, state.step, dict, save_options);
    }
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    fail("the checkpoint '", folder(state.step).string(), "' was not saved: ", error.what());
  }
  saved_ = state.step;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Waits for the last background save and throws its error: a run whose saves fail must stop,
/// because it would lose its further training steps.
void Checkpointer::check_last_save() {
  try {
    pending_.wait();
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    fail("the previous checkpoint '", folder(saved_).string(),
         "' failed in the background: ", error.what(), "; fix the cause and continue with ",
         option("resume"));
  }
}

/// Waits for the last background save. After a failed save, warns and returns false on all ranks,
/// so that the step can be saved again.
bool Checkpointer::settle() {
  try {
    pending_.wait();
    return true;
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    pending_ = {};
    saved_ = -1;
    warn(fmt::format("a checkpoint was not saved: {}", error.what()));
    return false;
  }
}

std::optional<double> Checkpointer::after_step(const TrainState& state, const Json& entries,
                                               bool stopped) {
  if (stopped || state.step != options_.steps) {
    const bool due = options_.every > 0 && state.step % options_.every == 0;
    return stopped || due ? save(state, entries, stopped || !options_.async) : std::nullopt;
  }
  try {
    return save(state, entries, !options_.async);
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error&) {
    unsaved_ = std::current_exception();
    return std::nullopt;
  }
}

std::exception_ptr Checkpointer::finish(const TrainState& state, const Json& entries) {
  if (settle()) {
    return unsaved_;
  }
  try {
    save(state, entries, /*at_once=*/true);
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error&) {
    return std::current_exception();
  }
  return nullptr;
}

std::filesystem::path Checkpointer::folder(std::int64_t step) const {
  return options_.folder / checkpoint::detail::step_folder_name(step);
}

}  // namespace tessera::training
