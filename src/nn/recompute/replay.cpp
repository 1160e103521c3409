// The recomputation of a frame: the function runs as in forward, with autograd on, and each tensor
// that autograd would save is the next one of the forward's. The graph that it builds is thrown
// away; only these tensors are wanted.

#include "recompute/replay.h"

#include "tessera/core/error.h"

namespace tessera::nn::detail {
namespace {

/// The hooks of the recomputed graph. They keep the tensor: backward never walks this graph, which
/// is freed at once.
class Kept final : public tessera::detail::SavedVariableHooks {
 public:
  explicit Kept(Replay& replay) : replay_(replay) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.detach();
    replay_.pack(tensor);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  Replay& replay_;
  at::Tensor tensor_;
};

}  // namespace

Replay::Replay(Frame& frame) : frame_(frame), tensors_(frame.packed()) {
  if (frame.options().policy) {
    operators_.emplace(frame.operators(), frame.options().counts.get());
    mode_.emplace(*operators_);
  }
}

void Replay::pack(const at::Tensor& tensor) {
  const std::size_t index = packed_++;
  // More than the forward saved. While that still runs (a backward within it) more is expected.
  if (index >= tensors_.size()) {
    TESSERA_CHECK(!frame_.finished_ || !frame_.options().check_determinism,
                  "checkpoint: the recomputation saves more tensors for backward than the forward, "
                  "which saved ",
                  tensors_.size(), "; the checkpointed function must do the same both times");
    return;
  }
  const Frame::Saved& saved = frame_.saved_[index];
  if (frame_.options().check_determinism) {
    saved.tensor.check(tensor, index);
  }
  // Its node may be gone already: then it need not be kept.
  if (saved.needed) {
    tensors_[index].emplace(tensor);
  }
  if (frame_.options().early_stop && packed_ == tensors_.size()) {
    // Through the user's function, whose destructors run.
    throw StopRecomputation{};
  }
}

/// Reached only if the function ran to its end, without an early stop.
void Replay::finish() {
  TESSERA_CHECK(packed_ >= tensors_.size(), "checkpoint: the recomputation saved ", packed_,
                " tensors for backward, but the forward saved ", tensors_.size(),
                "; the checkpointed function must do the same both times");
}

std::unique_ptr<tessera::detail::SavedVariableHooks> Replay::hooks() {
  return std::make_unique<Kept>(*this);
}

std::uint64_t Replay::replay_count() {
  TESSERA_CHECK(next_count_ < frame_.counts_.size(),
                "checkpoint: the recomputation counts more calls (of dropout, say) than the "
                "forward, which counted ",
                frame_.counts_.size(), "; the checkpointed function must do the same both times");
  return frame_.counts_[next_count_++];
}

}  // namespace tessera::nn::detail
