#include "examples/llama/train/checkpoints.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iostream>
#include <optional>
#include <system_error>
#include <utility>

#include "examples/llama/train/fine_tuning_record.h"
#include "examples/llama/train/training_data.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/runs.h"

namespace llama {

using namespace tessera;
using Json = nlohmann::json;

namespace {

Json scaler_to_json(const optim::GradScaler& scaler) {
  const optim::GradScaler::State& state = scaler.state();
  return {{"scale", state.scale},
          {"steps_since_overflow", state.steps_since_overflow},
          {"steps_since_change", state.steps_since_change},
          {"overflows_since_change", state.overflows_since_change}};
}

optim::GradScaler::State scaler_state(const Json& saved) {
  return {.scale = saved.at("scale"),
          .steps_since_overflow = saved.at("steps_since_overflow"),
          .steps_since_change = saved.at("steps_since_change"),
          .overflows_since_change = saved.at("overflows_since_change")};
}

Json random_to_json(const RandomState& random) {
  return {{"seed", random.seed}, {"calls", random.calls}};
}

}  // namespace

Checkpoints::Checkpoints(const TrainOptions& options, comm::WorldPtr world)
    : options_(options), world_(std::move(world)) {
  if (!options_.checkpoint.empty()) {
    find_source();
  }
  if (!resumes_) {
    source_ = options_.initial_load;
  }
  if (options_.steps > 0) {
    data_ = data_fingerprint(options_);
  }
}

void Checkpoints::find_source() {
  const std::string& dir = options_.checkpoint;
  const std::optional<std::int64_t> newest = checkpoint::newest_step(*world_, dir);
  const std::optional<std::int64_t> last = checkpoint::last_step(*world_, dir);
  resumes_ = newest && !options_.resume.empty();
  if (options_.resume_step >= 0) {
    resumes_ = true;
    // The run would write them again, and until then they would pass for the newest.
    TESSERA_CHECK(options_.steps == options_.resume_step || last <= options_.resume_step,
                  "--resume-step ", options_.resume_step, ": '", dir, "' has later steps, up to ",
                  last.value_or(0), "; move them away first");
  }
  TESSERA_CHECK(resumes_ || options_.resume != "newest", "--resume: '", dir,
                "' has no step that was saved whole; --resume auto begins anew in an empty folder");
  TESSERA_CHECK(resumes_ || options_.resume != "auto" || !last, "--resume auto: '", dir,
                "' has steps, but none that is whole; remove them to begin anew");
  TESSERA_CHECK(resumes_ || !last, "--checkpoint: '", dir,
                "' has steps of a run; pass --resume to go on with it, or another folder");
  if (resumes_) {
    go_on_from(options_.resume_step >= 0 ? options_.resume_step : *newest);
  } else {
    begin_run();
  }
}

/// A run that was started again before its first step was whole takes over what it has left.
void Checkpoints::begin_run() {
  std::optional<std::string> before;
  if (options_.resume == "auto") {
    before = checkpoint::unfinished_run(*world_, options_.checkpoint);
  }
  run_id_ = before ? *before : checkpoint::new_run_id(*world_);
  checkpoint::steps_to_withdraw(*world_, options_.checkpoint, -1, run_id_);
}

/// The run could not save a later step that stays.
void Checkpoints::go_on_from(std::int64_t step) {
  newest_ = step;
  source_ = folder(step);
  run_id_ = checkpoint::run_of_step(*world_, options_.checkpoint, step);
  if (options_.resume_step < 0 || options_.steps > step) {
    damaged_ = checkpoint::steps_to_withdraw(*world_, options_.checkpoint, step, run_id_);
  }
}

void Checkpoints::make_folder() {
  if (options_.checkpoint.empty()) {
    return;
  }
  std::error_code error;
  std::filesystem::create_directories(options_.checkpoint, error);
  if (!error && access(options_.checkpoint.c_str(), W_OK | X_OK) != 0) {
    error.assign(errno, std::generic_category());
  }
  TESSERA_CHECK(!error, "--checkpoint: '", options_.checkpoint,
                "' can't be written: ", error.message(), "; name another folder");
  lock_folder();
}

/// Until the process ends, however it ends. File systems without locks let everybody in.
void Checkpoints::lock_folder() {
  const std::string file = (std::filesystem::path(options_.checkpoint) / ".lock").string();
  lock_ = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  TESSERA_CHECK(lock_ >= 0, "--checkpoint: '", file, "' can't be made: ", std::strerror(errno),
                "; name another folder");
  TESSERA_CHECK(flock(lock_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, "--checkpoint: '",
                options_.checkpoint, "' is in use by another run; stop it, or name another folder");
}

Checkpoints::~Checkpoints() {
  if (lock_ >= 0) {
    close(lock_);
  }
}

/// Of a run's own steps nothing is left out because of what it once began with.
bool Checkpoints::excludes(const char* part) const {
  if (resumes_ && !options_.initial_load.empty()) {
    return false;
  }
  return std::ranges::find(options_.exclude, part) != options_.exclude.end();
}

void Checkpoints::load(const RunState& state) {
  checkpoint::StateDict dict{state.model};
  checkpoint::LoadOptions load_options;
  if (excludes("optimizer")) {
    load_options.exclude = {"optimizer.**"};
  } else {
    dict.optimizer = optim::named_state(state.optimizer, state.model);
  }
  check_fine_tuning_flags(dict);
  const checkpoint::LoadReport report = load_whole_step(dict, load_options);
  try {
    apply(report, state);
  } catch (const Json::exception&) {
    fail("the checkpoint '", source_.string(),
         "' is not of llama_train; take its weights with --initial-load and --exclude "
         "optimizer,data");
  }
}

/// Before the tensors: other adapters, or another average, would be a list of names that are
/// missing.
void Checkpoints::check_fine_tuning_flags(const checkpoint::StateDict& dict) {
  const Json entries = load_whole_step(dict, {.exclude = {"**"}, .partial = true}).entries;
  // Checkpoints of older programs have none.
  if (!entries.contains("fine_tuning")) {
    return;
  }
  const Json& saved = entries.at("fine_tuning");
  if (!resumes_) {
    const std::string change = adapters_change(saved, options_);
    TESSERA_CHECK(change.empty(), "--initial-load: the adapters are not those of '",
                  source_.string(), "': ", change,
                  "; give the same, or begin with its weights by --model: tessera-ckpt export-hf "
                  "writes them, and of a step with adapters llama_train --save-hf --merge-lora");
    return;
  }
  const std::string change =
      fine_tuning_change(saved, fine_tuning_record(options_), !excludes("optimizer"));
  TESSERA_CHECK(change.empty(), "the flags are not those of the checkpoint '", source_.string(),
                "': ", change, "; give the same, or begin a run with --initial-load");
}

checkpoint::LoadReport Checkpoints::load_whole_step(const checkpoint::StateDict& dict,
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

/// All ranks have the same error, and take the same step instead.
void Checkpoints::pass_over(const checkpoint::DamagedStep& error) {
  const std::int64_t damaged = newest_;
  const auto older = checkpoint::newest_step(*world_, options_.checkpoint, damaged);
  TESSERA_CHECK(older, "--resume: ", error.what(), "; '", options_.checkpoint,
                "' has no older step");
  go_on_from(*older);
  if (world_->rank() == 0) {
    std::cerr << fmt::format("llama_train: warning: step {} is damaged and passed over: {}\n",
                             damaged, error.what());
  }
}

void Checkpoints::apply(const checkpoint::LoadReport& report, const RunState& state) {
  const Json& entries = report.entries;
  loaded_ = report.step;
  // Without steps no data are read.
  if (!excludes("data") && options_.steps > 0) {
    const std::string change = data_change(entries.at("data"), data_);
    TESSERA_CHECK(change.empty(), "the data are not those of the checkpoint '", source_.string(),
                  "': ", change, "; give the same, or --exclude data to begin with other data");
    state.position.samples = entries.at("samples");
  }
  if (!excludes("optimizer") && state.scaler.enabled()) {
    // null: the run that saved it had no loss scaling.
    if (const Json& saved = entries.at("loss_scaler"); !saved.is_null()) {
      state.scaler.load_state(scaler_state(saved));
    }
  }
  if (!resumes_) {
    return;
  }
  const std::string change =
      checkpoint::config_change(entries.at("model").dump(), state.model.config().json);
  TESSERA_CHECK(change.empty(), "the model is not that of the checkpoint '", source_.string(),
                "': ", change, "; give the same config.json, or begin a run with --initial-load");
  const Json& random = entries.at("random");
  set_random_state({.seed = random.at("seed"), .calls = random.at("calls")});
  TESSERA_CHECK(report.step <= options_.steps, "the checkpoint '", source_.string(),
                "' is of a later step than --steps ", options_.steps, ": give --steps ",
                report.step, " or more");
  state.position.step = saved_ = report.step;
}

bool Checkpoints::is_due(std::int64_t step) const {
  return options_.checkpoint_every > 0 && step % options_.checkpoint_every == 0;
}

/// Not before there is something to save in their place.
void Checkpoints::withdraw_damaged() {
  for (const std::int64_t step : std::exchange(damaged_, {})) {
    if (world_->rank() == 0) {
      checkpoint::withdraw_step(options_.checkpoint, step, run_id_);
    }
  }
}

template <class Save>
std::optional<double> Checkpoints::save_by(const RunState& state, const Save& save_state) {
  const std::int64_t step = state.position.step;
  if (saved_ == step) {
    return std::nullopt;
  }
  const checkpoint::StateDict dict{state.model, optim::named_state(state.optimizer, state.model),
                                   entries(state)};
  const checkpoint::SaveOptions save_options{.run_id = run_id_, .keep = options_.keep};
  const auto start = std::chrono::steady_clock::now();
  withdraw_damaged();
  try {
    save_state(step, dict, save_options);
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    fail("the checkpoint '", folder(step).string(), "' was not saved: ", error.what());
  }
  saved_ = step;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::optional<double> Checkpoints::save(const RunState& state) {
  if (!options_.async) {
    return save_at_once(state);
  }
  return save_by(state, [this](std::int64_t step, const auto& dict, const auto& save_options) {
    check_last_save();
    pending_ = checkpoint::async_save(*world_, options_.checkpoint, step, dict, save_options);
  });
}

/// A run whose checkpoints fail would lose all that it goes on to do.
void Checkpoints::check_last_save() {
  try {
    pending_.wait();
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    fail("the one before, '", folder(saved_).string(),
         "', failed in the background: ", error.what(), "; mend that and go on with --resume");
  }
}

bool Checkpoints::settle() {
  try {
    pending_.wait();
    return true;
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    // The same on all ranks, and told: the step may be saved again, be it this one.
    pending_ = {};
    saved_ = -1;
    if (world_->rank() == 0) {
      std::cerr << fmt::format("llama_train: warning: a checkpoint was not saved: {}\n",
                               error.what());
    }
    return false;
  }
}

std::optional<double> Checkpoints::save_at_once(const RunState& state) {
  settle();
  return save_by(state, [this](std::int64_t step, const auto& dict, const auto& save_options) {
    checkpoint::save(*world_, options_.checkpoint, step, dict, save_options);
  });
}

Json Checkpoints::entries(const RunState& state) const {
  return {{"samples", state.position.samples},
          {"data", data_},
          {"model", Json::parse(state.model.config().json)},
          {"fine_tuning", fine_tuning_record(options_)},
          {"random", random_to_json(random_state())},
          {"loss_scaler", state.scaler.enabled() ? scaler_to_json(state.scaler) : Json()}};
}

std::filesystem::path Checkpoints::folder(std::int64_t step) const {
  return std::filesystem::path(options_.checkpoint) / checkpoint::step_folder_name(step);
}

}  // namespace llama
