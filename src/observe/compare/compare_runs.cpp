// The hooks that add each tensor of a step to the recording. All ranks gather every tensor; only
// rank 0 writes and compares, so that the others need not know which of the two it does.

#include "tessera/observe/compare_runs.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "compare/difference.h"
#include "compare/rank_parts.h"
#include "compare/recording.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/module.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::observe {
namespace {

/// The kind of a tensor. Activations are split over the batch, and so are their gradients.
enum class Kind { kInput, kParameter, kOutput, kOutputGradient, kParameterGradient };

bool is_of_batch(Kind kind) {
  return kind != Kind::kParameter && kind != Kind::kParameterGradient;
}

std::string of_module(const std::string& fqn) {
  return fqn.empty() ? "the model" : "'" + fqn + "'";
}

template <class Number>
std::optional<Number> positive_number_from(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') {
    return std::nullopt;
  }
  Number number{};
  const std::string_view view(text);
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), number);
  TESSERA_CHECK(error == std::errc() && end == view.data() + view.size() && number > 0,
                "environment variable ", variable, "=", view,
                ": not a positive number; set it to one, or unset it");
  return number;
}

/// A run that is recorded or compared. The model's hooks share it.
class ComparedRun : public std::enable_shared_from_this<ComparedRun> {
 public:
  ComparedRun(const DeviceMesh& mesh, const std::vector<std::string>& batch_dims,
              CompareOptions options)
      : mesh_(mesh), grid_(mesh, batch_dims), options_(std::move(options)) {}

  void open_recording();
  void attach_to(nn::ModuleBase& model);

 private:
  bool active() const {
    return step_ > 0 && step_ <= options_.steps && c10::GradMode::is_enabled() &&
           !nn::is_recomputing();
  }
  void begin_step(nn::TensorList inputs);
  void end_call(const std::string& fqn, const nn::ModuleBase& module, nn::TensorList outputs);
  void watch_gradient(const at::Tensor& output, const std::string& name);
  void end_backward(std::int64_t step);
  void end_backward_later(const at::Tensor& output);
  nn::NamedSlots parameters_in_backward_order() const;

  void take(Kind kind, const std::string& name, const at::Tensor& tensor);
  void compare(Kind kind, const std::string& name, const RankParts& parts,
               const std::string& layout);
  void end_comparison(std::int64_t step);
  void say(const std::string& text) const;

  DeviceMesh mesh_;
  BatchGrid grid_;
  CompareOptions options_;
  nn::NamedSlots parameters_;
  std::unique_ptr<Recording> recording_;  ///< on rank 0 of the mesh
  std::int64_t step_ = 0;                 ///< the forward under way, or the last one
  std::int64_t ended_ = 0;                ///< the last step whose backward has ended
  std::map<std::string, int> calls_;      ///< of the step, by FQN
  /// In the order in which the step's calls ended.
  std::unordered_map<const nn::ModuleBase*, std::size_t> order_;

  // State of the current step.
  std::map<Kind, double> magnitudes_;
  std::size_t compared_ = 0, different_ = 0;
  std::vector<std::string> not_recorded_;
};

void ComparedRun::open_recording() {
  comm::Communicator& group = mesh_.group_of_all_ranks();
  comm::run_or_fail_together(group, mesh_.device(), [&] {
    if (group.rank() == 0) {
      recording_ = std::make_unique<Recording>(options_.folder);
    }
  });
}

void ComparedRun::attach_to(nn::ModuleBase& model) {
  parameters_ = model.named_slots();
  const auto self = shared_from_this();
  model.add_forward_pre_hook(
      [self](nn::ModuleBase&, nn::TensorList inputs) { self->begin_step(inputs); });
  nn::visit_modules(model, [&](const std::string& fqn, nn::ModuleBase& module) {
    module.add_forward_hook([self, fqn](nn::ModuleBase& called, nn::TensorList outputs) {
      self->end_call(fqn, called, outputs);
    });
  });
}

void ComparedRun::begin_step(nn::TensorList inputs) {
  // An evaluation between two steps does not count as a step.
  if (step_ > options_.steps || !c10::GradMode::is_enabled() || nn::is_recomputing()) {
    return;
  }
  ++step_;
  calls_.clear();
  order_.clear();
  magnitudes_.clear();
  if (!active()) {
    return;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    take(Kind::kInput, fmt::format("input {} of the model", i), *inputs[i]);
  }
  for (const auto& [name, slot] : parameters_) {
    take(Kind::kParameter, "parameter '" + name + "'", slot->persistent());
  }
}

void ComparedRun::end_call(const std::string& fqn, const nn::ModuleBase& module,
                           nn::TensorList outputs) {
  if (!active()) {
    return;
  }
  order_.insert_or_assign(&module, order_.size());
  const int call = ++calls_[fqn];
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::string name =
        fmt::format("the output{} of {}{}", outputs.size() == 1 ? "" : fmt::format(" {}", i),
                    of_module(fqn), call == 1 ? "" : fmt::format(", call {}", call));
    take(Kind::kOutput, name, *outputs[i]);
    if (outputs[i]->defined() && outputs[i]->requires_grad()) {
      watch_gradient(*outputs[i], name);
      if (fqn.empty()) {
        end_backward_later(*outputs[i]);
      }
    }
  }
}

void ComparedRun::watch_gradient(const at::Tensor& output, const std::string& name) {
  // A single number is a mean over the rank's own samples: it differs between meshes.
  if (output.dim() == 0) {
    return;
  }
  detail::add_own_hook(output, detail::OwnHook::kNotice,
                       [self = shared_from_this(), name, step = step_](const at::Tensor& gradient) {
                         if (step == self->step_ && step > self->ended_) {
                           self->take(Kind::kOutputGradient, "the gradient of " + name, gradient);
                         }
                         return gradient;
                       });
}

/// Queued by the first gradient that reaches the model's results, and once more by itself: so it
/// runs after callbacks that others have queued by then: FSDP's reductions, and pending sums.
void ComparedRun::end_backward_later(const at::Tensor& output) {
  detail::add_own_hook(
      output, detail::OwnHook::kNotice,
      [self = shared_from_this(), step = step_](const at::Tensor& gradient) {
        detail::queue_end_of_backward([self, step] {
          detail::queue_end_of_backward([self, step] { self->end_backward(step); });
        });
        return gradient;
      });
}

void ComparedRun::end_backward(std::int64_t step) {
  // Once a step, though each result of the model has queued it.
  if (step != step_ || ended_ == step) {
    return;
  }
  for (const auto& [name, slot] : parameters_in_backward_order()) {
    take(Kind::kParameterGradient, "the gradient of parameter '" + name + "'",
         slot->persistent().grad());
  }
  ended_ = step;
  if (recording_ == nullptr) {
    return;
  }
  if (recording_->complete()) {
    end_comparison(step);
  } else if (step == options_.steps) {
    recording_->finish(to_string(mesh_), step);
    say(
        fmt::format("{} tensors of {} step{} are recorded in {}; run again on another mesh to "
                    "compare with them",
                    recording_->size(), step, step == 1 ? "" : "s", options_.folder.string()));
  }
}

/// Parameters of the last called module come first.
nn::NamedSlots ComparedRun::parameters_in_backward_order() const {
  const auto called = [this](const nn::SlotPtr& slot) {
    std::size_t last = 0;
    for (const nn::ParameterSlot::Owner& owner : slot->owners()) {
      const auto found = order_.find(owner.module);
      last = std::max(last, found == order_.end() ? 0 : found->second + 1);
    }
    return last;
  };
  nn::NamedSlots sorted = parameters_;
  std::ranges::stable_sort(
      sorted, [&](const auto& a, const auto& b) { return called(a.second) > called(b.second); });
  return sorted;
}

/// Beside the program's computation: nothing of it is recorded by autograd, or by selective
/// checkpointing.
void ComparedRun::take(Kind kind, const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return;
  }
  const c10::NoGradGuard no_grad;
  const OperatorModePause no_mode;
  at::Tensor own = tessera::is_distributed(tensor)
                       ? DistributedTensor(tensor.detach()).full_tensor()
                       : tensor.detach();
  if (kind == Kind::kOutputGradient) {
    // The gradient of the mean over all samples; the rank's own loss is one part of it.
    own = own.div(grid_.batches);
  }
  RankParts parts = gather_parts(own, mesh_, grid_, is_of_batch(kind));
  if (recording_ == nullptr) {
    return;
  }
  if (tessera::is_distributed(tensor)) {
    parts.shard = local_tensor(tensor).sizes().vec();
  }
  const std::string full_name = step_prefix(step_) + name;
  if (recording_->complete()) {
    compare(kind, full_name, parts, layout_of(tensor));
  } else {
    recording_->add(full_name, parts, layout_of(tensor));
  }
}

void ComparedRun::compare(Kind kind, const std::string& name, const RankParts& parts,
                          const std::string& layout) {
  const std::optional<RecordedTensor> recorded = recording_->find(name);
  if (!recorded) {
    not_recorded_.push_back(name);
    return;
  }
  double& magnitude = magnitudes_[kind];
  magnitude = std::max(magnitude, largest_of(recorded->parts.tensors.front()));
  ++compared_;
  // Each rank's queries give their copy of a head a term of the head's gradient.
  const Copies copies = kind == Kind::kOutputGradient ? Copies::kTerms : Copies::kEqual;
  const auto found = difference(parts, recorded->parts, {options_.tolerance, magnitude}, copies);
  if (found && different_++ == 0) {
    say(fmt::format("{} is the first that differs: {}; here {}, recorded {} of {}", name, *found,
                    layout, recorded->layout, recording_->mesh()));
  }
}

void ComparedRun::end_comparison(std::int64_t step) {
  if (step > recording_->steps()) {
    return;
  }
  const std::string recorded =
      fmt::format("{}, recorded on {}", options_.folder.string(), recording_->mesh());
  say(different_ == 0
          ? fmt::format("step {}: all {} tensors agree with {}", step, compared_, recorded)
          : fmt::format("step {}: {} of {} tensors differ from {}", step, different_, compared_,
                        recorded));
  const std::vector<std::string> missing = recording_->not_found(step);
  if (!missing.empty() || !not_recorded_.empty()) {
    say(fmt::format(
        "step {}: {} recorded tensors did not come{}, and {} that came were not "
        "recorded{}",
        step, missing.size(), missing.empty() ? "" : " (first: " + missing[0] + ")",
        not_recorded_.size(), not_recorded_.empty() ? "" : " (first: " + not_recorded_[0] + ")"));
  }
  compared_ = different_ = 0;
  not_recorded_.clear();
}

void ComparedRun::say(const std::string& text) const {
  const std::string line = "tessera: compare: " + text;
  if (options_.report) {
    options_.report(line);
  } else {
    std::cerr << line + "\n" << std::flush;
  }
}

}  // namespace

CompareOptions compare_options_from_environment() {
  CompareOptions options;
  if (const char* folder = std::getenv("TESSERA_COMPARE")) {
    options.folder = folder;
  }
  options.steps = positive_number_from<std::int64_t>("TESSERA_COMPARE_STEPS").value_or(1);
  options.tolerance = positive_number_from<double>("TESSERA_COMPARE_TOLERANCE");
  return options;
}

void compare_runs(nn::ModuleBase& model, const DeviceMesh& mesh,
                  const std::vector<std::string>& batch_dims, const CompareOptions& options) {
  if (options.folder.empty()) {
    return;
  }
  TESSERA_CHECK(options.steps > 0, "compare_runs: ", options.steps,
                " steps were asked for; ask for at least one");
  const auto run = std::make_shared<ComparedRun>(mesh, batch_dims, options);
  run->open_recording();
  run->attach_to(model);
}

}  // namespace tessera::observe
