// Metrics and traces of steps.

#include "tessera/training/recording.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/streams.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/module.h"
#include "tessera/nn/visit_modules.h"
#include "tessera/observe/kernel_profile.h"
#include "tessera/observe/memory_log.h"
#include "tessera/observe/memory_report.h"
#include "tessera/optim/optimizer.h"

namespace tessera::training {

MetricLog::MetricLog(MetricOptions options, comm::WorldPtr world)
    : options_(std::move(options)), world_(std::move(world)) {
  if (is_main()) {
    progress_ = std::make_unique<observe::Progress>(options_.steps, stdout);
  }
}

void MetricLog::open(std::int64_t done) {
  if (!is_main()) {
    return;
  }
  if (!options_.metrics.empty()) {
    history_ = observe::read_metrics(options_.metrics, done);
    writer_ = std::make_unique<observe::MetricsWriter>(options_.metrics, done);
  }
  if (!options_.tensorboard.empty()) {
    tensorboard_ = std::make_unique<observe::TensorBoardWriter>(options_.tensorboard, done + 1);
  }
}

void MetricLog::write(observe::StepMetrics metrics, std::int64_t tokens) {
  if (!is_main()) {
    return;
  }
  metrics.checkpoint_stall_s = std::exchange(stall_s_, std::nullopt);
  // A report shows the last step's traffic. Small blocks kept from every step would lie between
  // the step's large ones, and the heap would grow with the number of steps.
  if (!history_.empty()) {
    history_.back().comm.clear();
  }
  history_.push_back(metrics);
  if (writer_) {
    writer_->write(metrics);
  }
  if (tensorboard_) {
    observe::Scalars scalars = observe::titan_scalars(metrics, world_->size(), options_.device);
    scalars.emplace_back("n_tokens_seen", static_cast<double>(tokens));
    tensorboard_->write(metrics.step, scalars);
  }
  print(metrics);
  progress_->update(metrics.step, metrics.loss, metrics.tokens_per_s);
  world_->set_step(metrics.step);
}

void MetricLog::print(const observe::StepMetrics& metrics) {
  const bool last = metrics.step == options_.steps;
  if (metrics.step == 1 || metrics.step % options_.log_every == 0 || last) {
    progress_->line(observe::titan_line(metrics, world_->size()));
  }
  if (metrics.eval_loss) {
    progress_->line(
        fmt::format("validate step: {:2}  loss: {:7.4f}", metrics.step, *metrics.eval_loss));
  }
  if (metrics.skipped) {
    progress_->line(
        fmt::format("step: {:2}  left out: a gradient overflowed; the loss scale was {}",
                    metrics.step, *metrics.loss_scale));
  }
}

void MetricLog::stalled(std::optional<double> seconds) {
  stall_s_ = seconds;
}

void MetricLog::end() {
  if (!is_main() || !stall_s_ || history_.empty()) {
    return;
  }
  std::optional<double>& stall = history_.back().checkpoint_stall_s;
  stall = stall.value_or(0) + *std::exchange(stall_s_, std::nullopt);
  if (writer_) {
    writer_->write_again(history_.back());
  }
}

void MetricLog::line(const std::string& text) {
  if (is_main()) {
    progress_->line(text);
  }
}

namespace {

/// "dp=0, tp=1".
std::string coordinate_text(const DeviceMesh& mesh) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < mesh.coordinate().size(); ++i) {
    parts.push_back(fmt::format("{}={}", mesh.shape().names()[i], mesh.coordinate()[i]));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

}  // namespace

/// The memory of the step that takes the most, by unit and kind; the first one, which makes the
/// optimizer's state, counts only where it is alone. On a GPU only what libtorch's allocator
/// says of it. To be made before the model; one in a process.
class MemoryWatch {
 public:
  explicit MemoryWatch(const std::string& device) {
    if (device == "cpu") {
      log_.emplace(observe::TensorMemoryOptions{});
      comm::set_host_streams(log_->memory_lanes(comm::make_streams(c10::kCPU)));
    }
  }
  ~MemoryWatch() {
    if (log_) {
      comm::set_host_streams(nullptr);
    }
  }
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

  /// Learns which module runs; nullptr on a GPU.
  observe::ActivityListener* listener() { return log_ ? &*log_ : nullptr; }
  void begin_step(const nn::ModuleBase& model) {
    if (log_) {
      log_->begin_step([&model] { return fsdp::current_unit(model); });
    }
  }
  void end_step(const observe::StepMetrics& metrics, const nn::ModuleBase& model,
                optim::Optimizer& optimizer) {
    observe::RankMemory memory{.step = metrics.step,
                               .peak_reserved_bytes = metrics.peak_memory_bytes,
                               .peak_active_bytes = metrics.peak_active_bytes};
    if (log_) {
      if (units_.empty()) {
        find_units(model);
      }
      assign_state(model, optimizer);
      memory.tensors = log_->use(
          /*on_host=*/false, [this](const std::string& module) { return unit_of(module); });
    }
    const auto peak = [](const observe::RankMemory& of) {
      return of.tensors ? of.tensors->peak_bytes : of.peak_active_bytes.value_or(0);
    };
    // The first step makes the optimizer's state: what is of it shows in the later ones.
    if (++steps_ <= 2 || peak(memory) > peak(most_)) {
      most_ = std::move(memory);
    }
  }
  /// Collective over the world of the mesh. `place`: of this rank.
  void write(const std::filesystem::path& path, comm::World& world, const std::string& place) {
    most_.place = place;
    observe::write_memory_report(path, world, most_);
  }

 private:
  /// They have their names from the first forward on.
  void find_units(const nn::ModuleBase& model) {
    nn::visit_modules(model, [this](const std::string& fqn, const nn::ModuleBase& module) {
      if (fqn.empty() || fsdp::is_fully_sharded(module)) {
        units_[fqn] = fsdp::unit_name(module);
      }
    });
  }
  /// Made before any module ran, or by the update.
  void assign_state(const nn::ModuleBase& model, optim::Optimizer& optimizer) {
    std::map<const nn::ParameterSlot*, std::string> modules;
    for (const auto& [name, slot] : model.named_slots()) {
      modules[slot.get()] = name.substr(0, name.rfind('.'));
      log_->assign(local_tensor(slot->persistent()), modules[slot.get()]);
    }
    for (const optim::StateTensor& state : optimizer.state()) {
      log_->assign_state(local_tensor(state.tensor), modules[state.slot.get()]);
    }
  }
  std::string unit_of(const std::string& module) const {
    std::string_view fqn = module;
    while (!fqn.empty()) {
      if (const auto found = units_.find(fqn); found != units_.end()) {
        return found->second;
      }
      const std::size_t dot = fqn.rfind('.');
      fqn = fqn.substr(0, dot == std::string_view::npos ? 0 : dot);
    }
    return units_.at("");
  }

  std::optional<observe::MemoryLog> log_;                  ///< on a CPU
  std::map<std::string, std::string, std::less<>> units_;  ///< by the FQN of their modules
  observe::RankMemory most_;
  std::int64_t steps_ = 0;
};

/// Better to learn before the training than after it.
void Recording::check_can_write(const char* option, const std::filesystem::path& file) const {
  files::create_folders(std::filesystem::absolute(file).parent_path());
  std::error_code error;
  const std::filesystem::file_status found = std::filesystem::status(file, error);
  TESSERA_CHECK(!std::filesystem::exists(found) || std::filesystem::is_regular_file(found),
                "can't write ", options_.names.dashes, option, " ", file.string(),
                ", which is no regular file; give another name");
  try {
    // Makes a temporary file, as the later one will be, and removes it.
    const files::AtomicFile probe(file);
  } catch (const Error& unwritable) {
    fail("can't write ", options_.names.dashes, option, " ", file.string(), ": ",
         unwritable.what());
  }
}

/// A failed recording does not end the run. Rank 0, the only writer, continues without it.
void Recording::write_or_warn(const char* option, const std::function<void()>& write) const {
  try {
    write();
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    std::cerr << fmt::format("{}: warning: {}{} was not written: {}\n", options_.names.program,
                             options_.names.dashes, option, error.what());
  }
}

/// The steps that are left after `done` steps: a run that is started again has made some. {0, 0}:
/// none.
StepRange Recording::steps_to_trace(std::int64_t done, bool is_main) const {
  const StepRange& asked = options_.trace_steps;
  if (asked.first == 0) {
    // The first step of a run makes what the later ones have.
    const std::int64_t second = std::min(done + 2, options_.steps);
    return {second, second};
  }
  if (asked.first > done) {
    return asked;
  }
  const StepRange left = asked.last > done ? StepRange{done + 1, asked.last} : StepRange{};
  if (is_main) {
    std::cerr << fmt::format(
        "{}: warning: {}trace-steps {}:{}: the run continues after step {}, and {}\n",
        options_.names.program, options_.names.dashes, asked.first, asked.last, done,
        left.first > 0 ? fmt::format("traces steps {}:{}", left.first, left.last)
                       : "writes no trace");
  }
  return left;
}

Recording::Recording(RecordingOptions options) : options_(std::move(options)) {
  for (std::filesystem::path* file :
       {&options_.trace, &options_.profile, &options_.memory_report}) {
    *file = files::absolute_path(*file);  // written at the end, perhaps after a chdir()
  }
  if (!options_.memory_report.empty()) {
    memory_ = std::make_unique<MemoryWatch>(options_.device);
  }
}

Recording::~Recording() = default;

/// A run that is started again may have made all its steps.
bool Recording::has_step_left(std::int64_t done, bool is_main) const {
  const bool asked =
      !options_.trace.empty() || !options_.profile.empty() || !options_.memory_report.empty();
  const bool none = options_.steps > 0 && done >= options_.steps;
  if (asked && is_main && none) {
    std::cerr << fmt::format(
        "{}: warning: no step is left after step {}: no trace, profile or memory report is "
        "written\n",
        options_.names.program, done);
  }
  return !none;
}

void Recording::begin(const DeviceMesh& mesh, nn::ModuleBase& model, std::int64_t done) {
  const bool is_main = mesh.world()->rank() == 0;
  if (!has_step_left(done, is_main)) {
    memory_.reset();
    return;
  }
  if (!options_.trace.empty()) {
    steps_ = steps_to_trace(done, is_main);
  }
  const bool traced = steps_.first > 0;
  if (is_main && traced) {
    check_can_write("trace", options_.trace);
  }
  if (is_main && memory_) {
    check_can_write("memory-report", options_.memory_report);
  }
  if (is_main && !options_.profile.empty()) {
    check_can_write("profile", options_.profile);
    profiled_step_ = options_.steps;
  }
  if (!traced && !memory_) {
    return;
  }
  place_ = coordinate_text(mesh);
  watch_ = std::make_unique<observe::ModuleWatch>(model);
  if (memory_ && memory_->listener() != nullptr) {
    watch_->add(*memory_->listener());
  }
  if (traced) {
    trace_ = std::make_unique<observe::StepTrace>(mesh.world());
    watch_->add(*trace_);
  }
}

observe::StepMetrics Recording::run(const TrainState& state,
                                    const std::function<observe::StepMetrics()>& make) {
  const std::int64_t step = state.step + 1;
  if (step != profiled_step_) {
    return record(step, state, make);
  }
  observe::KernelProfile profile(c10::Device(options_.device));
  observe::StepMetrics metrics = record(step, state, make);
  write_or_warn("profile", [&] { profile.write(options_.profile); });
  return metrics;
}

observe::StepMetrics Recording::record(std::int64_t step, const TrainState& state,
                                       const std::function<observe::StepMetrics()>& make) {
  if (!memory_ && !traces(step)) {
    return make();
  }
  observe::StepMetrics metrics;
  {
    const observe::ModuleWatch::Scope scope(*watch_);
    if (memory_) {
      memory_->begin_step(state.model);
    }
    if (traces(step)) {
      trace_->begin_step(step);
    }
    metrics = make();
    if (traces(step)) {
      trace_->end_step();
    }
  }
  if (memory_) {
    memory_->end_step(metrics, state.model, state.optimizer);
  }
  if (trace_ && step == steps_.last) {
    write_or_warn("trace", [this] { trace_->write(options_.trace, place_); });
  }
  return metrics;
}

void Recording::end(comm::World& world) {
  if (memory_) {
    write_or_warn("memory-report", [&] { memory_->write(options_.memory_report, world, place_); });
  }
}

}  // namespace tessera::training
