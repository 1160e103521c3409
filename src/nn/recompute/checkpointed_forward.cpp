// The forward of a checkpointed function: while it runs, autograd gets placeholders for the tensors
// that it saves, and with a policy operators are recorded. The public policies are here too.

#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "recompute/checkpointed_region.h"
#include "recompute/frame.h"
#include "tessera/nn/checkpoint.h"

namespace tessera::nn {
namespace detail {
namespace {

/// What autograd keeps instead of a tensor: the frame, and the tensor's number in it.
class Placeholder final : public tessera::detail::SavedVariableHooks {
 public:
  explicit Placeholder(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  ~Placeholder() override {
    // A placeholder that autograd made but never packed has no number.
    if (index_) {
      // Its node is gone: recomputations need not keep this tensor.
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

/// The forward of a checkpointed function, while it lives.
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
  // Nothing is saved without gradients. This is also how a checkpointed inference costs nothing.
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
  // The operators with the most compute for their memory; attention by each kernel's name.
  return save_operators(
      {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "tessera::fp8_linear",
       "aten::convolution", "aten::_scaled_dot_product_flash_attention",
       "aten::_scaled_dot_product_flash_attention_for_cpu",
       "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
       "aten::_flash_attention_forward", "aten::_efficient_attention_forward",
       "tessera::chunked_attention"});
}

}  // namespace tessera::nn
