// checkpoint() and apply_activation_checkpointing(): the forward of a checkpointed function, the
// policies that select operators, and the selection of modules.

#include "tessera/nn/checkpoint.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>

#include "recompute.h"
#include "tessera/core/error.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::nn {
namespace detail {
namespace {

/// The object that autograd saves in place of a tensor: a reference to the frame, and the tensor's
/// number in it.
class Placeholder final : public tessera::detail::SavedVariableHooks {
 public:
  explicit Placeholder(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  ~Placeholder() override {
    if (index_) {
      // When the graph node is destroyed, recomputations need not save this tensor any more.
      frame_->release(*index_);
    }
  }
  void call_pack_hook(const at::Tensor& tensor) override { index_ = frame_->pack(tensor); }
  at::Tensor call_unpack_hook() override { return frame_->unpack(index_.value()); }

 private:
  std::shared_ptr<Frame> frame_;
  std::optional<std::size_t> index_;
};

}  // namespace

class CheckpointedForward final : public CheckpointedRegion {
 public:
  CheckpointedForward(std::shared_ptr<Frame> frame, std::span<at::Tensor* const> inputs)
      : frame_(std::move(frame)) {
    if (frame_->options().policy) {
      operators_.emplace(
          frame_->operators(), frame_->options(), [this] { return frame_->packed(); }, inputs);
      mode_.emplace(*operators_);
    }
  }
  void finish() { frame_->finish(); }

  std::unique_ptr<tessera::detail::SavedVariableHooks> hooks() override {
    return std::make_unique<Placeholder>(frame_);
  }
  bool replays() const override { return false; }
  std::uint64_t replay_count() override { return 0; }
  void record_count(std::uint64_t count) override { frame_->record_count(count); }

 private:
  std::shared_ptr<Frame> frame_;
  std::optional<RecordOperators> operators_;
  std::optional<OperatorModeScope> mode_;
};

CheckpointedRegionScope::CheckpointedRegionScope(const CheckpointOptions& options,
                                                 std::span<at::Tensor* const> inputs, Rerun rerun) {
  // Calls the function directly without gradients: nothing is saved, so checkpointed inference has
  // no overhead.
  if (!c10::GradMode::is_enabled()) {
    return;
  }
  install_engine();
  if (options.counts != nullptr) {
    ++options.counts->regions;
  }
  forward_ = std::make_unique<CheckpointedForward>(
      std::make_shared<Frame>(options, inputs, std::move(rerun)), inputs);
}

CheckpointedRegionScope::~CheckpointedRegionScope() = default;

void CheckpointedRegionScope::finish() {
  if (forward_ != nullptr) {
    forward_->finish();
  }
}

}  // namespace detail

OperatorPolicy save_operators(std::vector<std::string> names) {
  return [names = std::move(names)](const OperatorCall& call) {
    const bool named = std::ranges::find(names, call.name) != names.end();
    return named ? SavePolicy::kMustSave : SavePolicy::kPreferRecompute;
  };
}

OperatorPolicy save_matmuls_and_attention() {
  // Saves the results of the operators with the most compute per byte of result.
  return save_operators(
      {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "tessera::fp8_linear",
       "aten::convolution", "aten::_scaled_dot_product_flash_attention",
       "aten::_scaled_dot_product_flash_attention_for_cpu",
       "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
       "aten::_flash_attention_forward", "aten::_efficient_attention_forward",
       "tessera::chunked_attention"});
}

// Selects modules by a predicate or a pattern, and then every n-th of the selected modules.

namespace {

using NamedModules = std::vector<std::pair<std::string, ModuleBase*>>;

NamedModules select_modules(ModuleBase& root, const ModulePredicate& select) {
  NamedModules selected;
  // Visits a shared module under each of its FQNs, because a pattern may match any of them.
  visit_modules(root,
                [&](const std::string& fqn, ModuleBase& module) {
                  if (select(fqn, module)) {
                    selected.emplace_back(fqn, &module);
                  }
                },
                {.every_place = true});
  return selected;
}

}  // namespace

ModulePredicate named(std::string pattern) {
  return [pattern = std::move(pattern)](const std::string& fqn, const ModuleBase&) {
    return matches_fqn(pattern, fqn);
  };
}

std::vector<std::string> apply_activation_checkpointing(ModuleBase& root,
                                                        const ActivationCheckpointing& what) {
  TESSERA_CHECK(what.select && what.every > 0,
                "activation checkpointing needs a predicate that selects modules, and every n-th "
                "of them with n > 0");
  const NamedModules selected = select_modules(root, what.select);
  TESSERA_CHECK(!selected.empty(), "activation checkpointing selects no module of this ",
                root.name(), "; look at the pattern or the class");
  std::vector<std::string> applied;
  for (std::size_t i = 0; i < selected.size(); i += what.every) {
    const auto& [fqn, module] = selected[i];
    // Skips a module that is already checkpointed, or was visited under another FQN.
    if (module->checkpoints_calls()) {
      continue;
    }
    TESSERA_CHECK(
        dynamic_cast<const AdoptedModule*>(module) == nullptr, "activation checkpointing selects '",
        fqn, "', a ", module->name(),
        " inside of a module in nn::Hooked, which calls it without hooks; apply it to the "
        "module that nn::Hooked holds");
    module->checkpoint_calls(what.options);
    applied.push_back(fqn);
  }
  return applied;
}

}  // namespace tessera::nn
